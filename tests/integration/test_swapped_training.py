"""Swapped models of transformers in training: Trainer, compile, half precision, gradient checkpointing."""

import copy

import pytest
import torch

from fairseq_collab import (
    ALBERTCollaborativeAdapter,
    BERTCollaborativeAdapter,
    DistilBERTCollaborativeAdapter,
    load_collaborative,
    save_collaborative,
    swap_to_collaborative,
)

FAMILIES = {
    "Bert": BERTCollaborativeAdapter,
    "DistilBert": DistilBERTCollaborativeAdapter,
    "Albert": ALBERTCollaborativeAdapter,
}


@pytest.fixture
def swapped(hf_model):
    def make(family="Bert", head="SequenceClassification", key_dim=24, **options):
        model = hf_model(family, head, **options)
        swap_to_collaborative(model, FAMILIES[family], key_dim, progress=False)
        return model

    return make


def examples(count=32, length=10):
    """Sequences of token 7 or of token 9 in noise, and which of the two: something to learn."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 100, (count, length), generator=generator)
    labels = torch.randint(0, 2, (count,), generator=generator)
    ids[:, 1:4] = (7 + 2 * labels).unsqueeze(1)
    mask = torch.ones_like(ids)
    mask[::3, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_training_loop_learns(swapped, family):
    model, data = swapped(family).train(), examples()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(**data).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 < losses[0]


def test_a_trainer_trains_resumes_and_its_model_can_be_kept(swapped, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    data = examples()
    rows = [{key: value[i] for key, value in data.items()} for i in range(len(data["labels"]))]

    def trainer(model, epochs):
        options = {"num_train_epochs": epochs, "save_strategy": "epoch", "report_to": [], "use_cpu": True}
        more = {"per_device_train_batch_size": 8, "learning_rate": 2e-3, "seed": 1, "disable_tqdm": True}
        return Trainer(model, TrainingArguments(str(tmp_path / "run"), **options, **more), train_dataset=rows)

    def loss(model):
        return model.eval()(**data).loss.item()

    first = trainer(swapped(), 4)
    first.train()
    resumed = trainer(swapped(), 8)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.epoch == 8
    model = resumed.model
    assert loss(model) < loss(first.model) < loss(swapped())
    again = load_collaborative(save_collaborative(model, tmp_path / "kept"))
    assert torch.equal(again(**data).logits, model(**data).logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("key_dim", [24, 48])
def test_an_attention_compiles_into_one_graph(swapped, family, key_dim):
    model = swapped(family, "Model", key_dim)
    name = {"Bert": "encoder.layer.0.attention.self", "DistilBert": "transformer.layer.0.attention"}.get(family)
    module = model.get_submodule(name or "encoder.albert_layer_groups.0.albert_layers.0.attention")
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    hidden = torch.randn(2, 9, 48)
    mask = (torch.arange(9) < torch.tensor([[9], [5]]))[:, None, None, :]
    for given in ((hidden, mask), (hidden, None)):
        given = (given[0], given[0], *given) if "query" in module.argument_names else given
        torch.testing.assert_close(compiled(*given)[0], module(*given)[0])


def test_a_model_compiles_into_one_graph(swapped):
    model = swapped()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    data = examples(4)
    torch.testing.assert_close(compiled(**data).logits, model(**data).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_as_good_as_that_of_the_original(hf_model, swapped, family):
    data = examples(8)
    data.pop("labels")
    original, collab = hf_model(family, "Model"), swapped(family, "Model", 48)
    with torch.no_grad():
        exact = copy.deepcopy(original).double()(**data)[0]
        plain, fast = (one.to(torch.bfloat16)(**data)[0].double() for one in (original, collab))
    mask = data["attention_mask"].bool()
    plain_error, error = ((one - exact)[mask].square().mean().sqrt() for one in (plain, fast))
    assert fast.isfinite().all() and error <= 2 * plain_error


def test_autocast(swapped):
    model, data = swapped().train(), examples(8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**data).loss
    loss.backward()
    assert all(one.grad is None or one.grad.isfinite().all() for one in model.parameters())


@pytest.mark.parametrize("family", ["Bert", "DistilBert"])
def test_gradient_checkpointing_gives_the_same_gradients(swapped, family):
    data, found = examples(8), []
    for checkpointing in (False, True):
        zero = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        if family == "DistilBert":
            zero = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
        model = swapped(family, **zero).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(**data).loss.backward()
        found.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert any(name.endswith("mixing") for name in found[0])
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)


def test_dropout_acts_in_training_only(swapped):
    model = swapped("Bert", "Model", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5)
    data = examples(4)
    data.pop("labels")
    assert torch.equal(model(**data)[0], model(**data)[0])
    model.train()
    assert not torch.equal(model(**data)[0], model(**data)[0])
