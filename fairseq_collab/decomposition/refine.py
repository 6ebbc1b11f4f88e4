"""Training converted attentions on unlabelled text: layer by layer against the original layers, or end to end.

Only ``q_proj``, ``k_proj``, ``mixing`` and ``query_bias`` move. The result is never worse than the start on the text
that is held out. What runs the model is an ``ObservedModel``; which layers there are is the caller's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from fairseq_collab.attention import CollaborativeAttention
from fairseq_collab.decomposition.observation import Observation, ObservedModel, output_error

LEARNING_RATE = 0.03  # of layer-wise refinement and
DISTILL_LEARNING_RATE = 0.02  # of distillation, relative to the root mean square of each parameter; falls to 0
CHECKS = 10  # looks at the held-out text, evenly over the steps
PATIENCE = 3  # checks without improvement after which training ends


def converted_parameters(student: CollaborativeAttention) -> list[torch.nn.Parameter]:
    """The parameters of a layer that conversion made."""
    return [student.q_proj.weight, student.k_proj.weight, student.mixing, student.query_bias]


def refine_layers(
    model: ObservedModel, students: Mapping[str, CollaborativeAttention], steps: int, progress: bool = True
) -> dict[str, tuple[float, float]]:
    """Fits the output of every student to that of the attention of its name, on the inputs of the original model.

    All layers learn from the same run of the original model, so that memory does not grow with the text.

    Returns:
        relative squared error of each layer's output on the held-out text, before and after.
    """
    names = list(students)
    errors: dict[str, Tensor] = {}

    def see(one: Observation) -> None:
        if one.name in students:
            with torch.enable_grad():
                errors[one.name] = output_error(students[one.name], one)

    def loss(batch: Any) -> Tensor:
        model.observe(batch, see)
        return torch.stack([errors[name] for name in names])

    found = _train(
        [converted_parameters(students[name]) for name in names],
        *(loss, model.batches(False), model.batches(True), steps, LEARNING_RATE, "refining", progress),
    )
    return dict(zip(names, found, strict=True))


def distill(
    teacher: ObservedModel,
    student: Callable[[Any], Tensor],
    layers: Sequence[CollaborativeAttention],
    steps: int,
    progress: bool = True,
) -> tuple[float, float]:
    """Fits the predictions of a whole converted model to the original's.

    Args:
        teacher: the original. student: log-probabilities (tokens, V) of the converted model, with gradients.
        layers: its converted attentions.

    Returns:
        mean Kullback-Leibler divergence in nats a token on the held-out text, before and after.
    """

    def loss(batch: Any) -> Tensor:
        with torch.no_grad():
            wanted = teacher.log_probs(batch)
        return torch.nn.functional.kl_div(student(batch), wanted, log_target=True, reduction="batchmean").unsqueeze(0)

    parameters = [parameter for layer in layers for parameter in converted_parameters(layer)]
    batches = teacher.batches(False), teacher.batches(True)
    return _train([parameters], loss, *batches, steps, DISTILL_LEARNING_RATE, "distilling", progress)[0]


def _train(
    groups: list[list[torch.nn.Parameter]],
    loss: Callable[[Any], Tensor],
    batches: Sequence[Any],
    held_out: Sequence[Any],
    steps: int,
    learning_rate: float,
    title: str,
    progress: bool,
) -> list[tuple[float, float]]:
    """Adam on the sum of ``loss(batch)`` (groups,); each group keeps its best values on the held-out text."""

    def judge() -> Tensor:
        with torch.no_grad():
            return torch.stack([loss(batch).detach().double().cpu() for batch in held_out]).mean(0)

    for parameter in (parameter for group in groups for parameter in group):
        parameter.requires_grad_(True)
    settings = [
        {"params": [parameter], "lr": learning_rate * max(parameter.detach().square().mean().sqrt().item(), 1e-8)}
        for group in groups
        for parameter in group
    ]
    optimizer = torch.optim.Adam(settings, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    start = best = judge()
    kept = [[parameter.detach().clone() for parameter in group] for group in groups]
    since_best = 0
    with tqdm(total=steps, desc=title, unit="step", disable=not progress) as bar:
        for step in range(1, steps + 1):
            optimizer.zero_grad(set_to_none=True)
            loss(batches[(step - 1) % len(batches)]).sum().backward()
            optimizer.step()
            schedule.step()
            bar.update()
            if step % max(1, steps // CHECKS) and step < steps:
                continue
            now = judge()
            better = now < best
            for number in better.nonzero().flatten().tolist():
                kept[number] = [parameter.detach().clone() for parameter in groups[number]]
            best = torch.where(better, now, best)
            since_best = 0 if better.any() else since_best + 1
            bar.set_postfix_str(f"held-out error {best.mean():.4f}, at first {start.mean():.4f}")
            if since_best == PATIENCE:
                break
    with torch.no_grad():
        for group, values in zip(groups, kept, strict=True):
            for parameter, value in zip(group, values, strict=True):
                parameter.copy_(value)
                parameter.grad = None
    return list(zip(start.tolist(), best.tolist(), strict=True))
