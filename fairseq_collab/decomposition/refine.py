"""Training converted attentions on unlabelled text: layer by layer against the original layers, or end to end.

Only ``q_proj``, ``k_proj``, ``mixing`` and ``query_bias`` move. The result is never worse than the start on the text
that is held out. What runs the model is an ``ObservedModel``; which layers there are is the caller's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from tqdm import tqdm

from fairseq_collab.attention import CollaborativeAttention
from fairseq_collab.decomposition.calibration import Whitening
from fairseq_collab.decomposition.observation import Observation, ObservedModel, output_error

LEARNING_RATE = 0.01  # of layer-wise refinement and
DISTILL_LEARNING_RATE = 0.02  # of distillation, relative to the root mean square of each parameter; falls to 0
WARM_UP = 10  # steps
DAMPING = 1e-2  # of the mean eigenvalue of the inputs' covariance, in the coordinates of training
SMALLEST = 1e-4  # size that a parameter counts as at least, so that a bias of zeros can move
CHECKS = 20  # looks at the held-out text, evenly over the steps
RETREAT = 0.3  # what the learning rate of a group is multiplied with where a check finds it worse than its best
FEWEST = 5  # steps between two checks
PATIENCE = 5  # checks at which no group is better, after which training ends


@dataclass(frozen=True)
class Student:
    """A converted attention to train, and what its inputs look like.

    With ``whitening`` the projections are trained in coordinates in which the inputs have unit covariance, so that
    every step changes the scores alike, however unequal the sizes of the inputs are.
    """

    module: CollaborativeAttention
    whitening: Whitening | None = None

    def weights(self) -> list[Tensor]:
        """A copy of what conversion made."""
        module = self.module
        parts = (module.q_proj.weight, module.k_proj.weight, module.mixing, module.query_bias)
        return [part.detach().clone() for part in parts]

    def begin(self) -> list[torch.nn.Parameter]:
        """Prepares training; the parameters to train."""
        module, whitening = self.module, self.whitening
        if whitening is not None:
            for projection, root in ((module.q_proj, whitening.query_root), (module.k_proj, whitening.key_root)):
                parametrize.register_parametrization(projection, "weight", _Whitened(root, projection.weight))
        parameters = [*module.q_proj.parameters(), *module.k_proj.parameters(), module.mixing, module.query_bias]
        for parameter in parameters:
            parameter.requires_grad_(True)
        return parameters

    @torch.no_grad()
    def take(self, weights: list[Tensor]) -> None:
        """Goes on from these weights."""
        q_weight, k_weight, mixing, query_bias = weights
        if self.whitening is None:
            self.module.q_proj.weight.copy_(q_weight)
            self.module.k_proj.weight.copy_(k_weight)
        else:
            self.module.q_proj.weight, self.module.k_proj.weight = q_weight, k_weight
        self.module.mixing.copy_(mixing)
        self.module.query_bias.copy_(query_bias)

    @torch.no_grad()
    def end(self, weights: list[Tensor]) -> None:
        """Undoes :meth:`begin` and takes these weights."""
        module = self.module
        if self.whitening is not None:
            for projection in (module.q_proj, module.k_proj):
                parametrize.remove_parametrizations(projection, "weight")
        parts = (module.q_proj.weight, module.k_proj.weight, module.mixing, module.query_bias)
        for part, value in zip(parts, weights, strict=True):
            part.requires_grad_(False).copy_(value)
            part.grad = None


class _Whitened(torch.nn.Module):
    """A weight (R, D) as that of whitened inputs times the inverse root of their covariance."""

    def __init__(self, root: Tensor, weight: Tensor):
        super().__init__()
        values, vectors = torch.linalg.eigh(root)
        # more than for the fit: a step must not be large in directions that little text has shown
        values = (values.square() + DAMPING * values.square().mean()).sqrt()
        self.register_buffer("root", (vectors * values @ vectors.T).to(weight))
        self.register_buffer("inverse", (vectors / values @ vectors.T).to(weight))

    def forward(self, white: Tensor) -> Tensor:
        return white @ self.inverse

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight @ self.root


def refine_layers(
    model: ObservedModel, students: Mapping[str, Student], steps: int, progress: bool = True
) -> dict[str, tuple[float, float]]:
    """Fits the output of every student to that of the attention of its name, on the inputs of the original model.

    All layers learn from the same run of the original model, so that memory does not grow with the text.

    Returns:
        relative squared error of each layer's output on the held-out text, before and after.
    """
    names = list(students)
    errors: dict[str, list[Tensor]] = {}

    def see(one: Observation) -> None:
        if one.name in students:
            with torch.enable_grad():
                errors[one.name].append(output_error(students[one.name].module, one))

    def loss(batch: Any) -> Tensor:
        errors.update((name, []) for name in names)
        model.observe(batch, see)
        # a layer that is used several times in a run has several errors
        return torch.stack([torch.stack(errors[name]).mean() for name in names])

    found = _train(
        [[students[name]] for name in names],
        *(loss, model.batches(False), model.batches(True), steps, LEARNING_RATE, "refining", progress),
    )
    return dict(zip(names, found, strict=True))


def distill(
    teacher: ObservedModel,
    student: Callable[[Any], Tensor],
    layers: Sequence[Student],
    steps: int,
    progress: bool = True,
) -> tuple[float, float]:
    """Fits the predictions of a whole converted model to the original's.

    It learns from noisy text, which the original labels like any other: on text that the original was trained on, its
    predictions are those of a memory. What is held out stays as it is.

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

    batches = teacher.batches(False), teacher.batches(True)
    settings = steps, DISTILL_LEARNING_RATE, "distilling", progress
    before, after = _train([list(layers)], loss, *batches, *settings, teacher.noisy)[0]
    return max(0.0, before), max(0.0, after)  # rounding can leave less than 0


def _train(
    groups: list[list[Student]],
    loss: Callable[[Any], Tensor],
    batches: Sequence[Any],
    held_out: Sequence[Any],
    steps: int,
    rate: float,
    title: str,
    progress: bool,
    vary: Callable[[Any], Any] = lambda batch: batch,
) -> list[tuple[float, float]]:
    """Adam on the sum of ``loss(vary(batch))`` (groups,).

    Each group keeps its best weights on the held-out text; one that got worse goes back to them with smaller steps.
    """

    def judge() -> Tensor:
        with torch.no_grad():
            return torch.stack([loss(batch).detach().double().cpu() for batch in held_out]).mean(0)

    start = best = judge()
    kept = [[student.weights() for student in group] for group in groups]
    try:
        optimizer = torch.optim.Adam(
            [
                {
                    "params": [one],
                    "lr": rate * max(one.detach().square().mean().sqrt().item(), SMALLEST),
                    "group": number,
                }
                for number, group in enumerate(groups)
                for student in group
                for one in student.begin()
            ],
            betas=(0.9, 0.98),
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1, (step + 1) / WARM_UP, 1 - step / steps)
        )
        since_best = 0
        with tqdm(total=steps, desc=title, unit="step", disable=not progress) as bar:
            for step in range(1, steps + 1):
                optimizer.zero_grad(set_to_none=True)
                loss(vary(batches[(step - 1) % len(batches)])).sum().backward()
                optimizer.step()
                schedule.step()
                bar.update()
                if step % max(FEWEST, steps // CHECKS) and step < steps:
                    continue
                now = judge()
                better = now < best
                best = torch.where(better, now, best)
                for number, group in enumerate(groups):
                    if better[number]:
                        kept[number] = [student.weights() for student in group]
                        continue
                    for student, weights in zip(group, kept[number], strict=True):
                        student.take(weights)
                    for position, settings in enumerate(optimizer.param_groups):
                        if settings["group"] == number:
                            schedule.base_lrs[position] *= RETREAT
                since_best = 0 if better.any() else since_best + 1
                bar.set_postfix_str(f"held-out error {best.mean():.4f}, at first {start.mean():.4f}")
                if since_best == PATIENCE:
                    break
    finally:
        for group, values in zip(groups, kept, strict=True):
            for student, weights in zip(group, values, strict=True):
                student.end(weights)
    return list(zip(start.tolist(), best.tolist(), strict=True))
