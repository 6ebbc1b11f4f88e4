"""Training converted layers against what an original model does, here a model of two attentions."""

import pytest
import torch

from fairseq_collab.attention import CollaborativeAttention
from fairseq_collab.decomposition import refine
from fairseq_collab.decomposition.calibration import Whitening
from fairseq_collab.decomposition.layer import ConcatenatedLayer, convert_layer
from fairseq_collab.decomposition.observation import Observation, collect_moments, output_error
from fairseq_collab.decomposition.refine import Student
from fairseq_collab.errors import CollabError

D, H, R, WORDS = 16, 4, 6, 11
CONVERTED = {"q_proj.weight", "k_proj.weight", "mixing", "query_bias"}


class TwoLayers:
    """Embeddings, two self-attentions, the second of them causal, and a projection to words."""

    def __init__(self):
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(WORDS, D, padding_idx=0)
        self.layers = {name: CollaborativeAttention(D, H, D, collaborative=False) for name in ("first", "second")}
        for layer in self.layers.values():
            for projection in (layer.q_proj, layer.k_proj):
                projection.weight.data *= 2
        for module in (self.embed, *self.layers.values()):
            module.requires_grad_(False)
        tokens = torch.randint(1, WORDS, (96, 9), generator=torch.Generator().manual_seed(1))
        tokens[:, 7:][::2] = 0
        self.noised = []
        self.text = {False: list(tokens[:64].split(16)), True: list(tokens[64:].split(16))}

    def batches(self, held_out):
        return self.text[held_out]

    def run(self, batch, layers, see=None):
        x, valid = self.embed(batch), batch != 0
        for name, layer in layers.items():
            mask = torch.full((9, 9), float("-inf")).triu(1) if name == "second" else None
            out, _ = layer(x, key_padding_mask=~valid, attn_mask=mask)
            if see is not None:
                see(Observation(name, x, x, valid, valid, mask, out))
            x = x + out
        return torch.log_softmax(x @ self.embed.weight.T, -1)[valid]

    def observe(self, batch, see):
        with torch.no_grad():
            self.run(batch, self.layers, see)

    def log_probs(self, batch):
        return self.run(batch, self.layers)

    def noisy(self, batch):
        self.noised.append(batch)
        return torch.where(batch.eq(1), 2, batch)


@pytest.fixture
def model():
    return TwoLayers()


def converted(model, key_dim, whitenings=None):
    """A collaborative layer in the place of each original one, all frozen."""
    found = {}
    for name, layer in model.layers.items():
        old = ConcatenatedLayer(layer.q_proj.weight, layer.q_proj.bias, layer.k_proj.weight, H)
        new = convert_layer(old, key_dim, 4, whitenings and whitenings[name])
        student = CollaborativeAttention(D, H, key_dim, mix_dim=4, mix_layout="picked")
        kept = {k: v for k, v in layer.state_dict().items() if k.startswith(("v_proj", "out_proj"))}
        parts = {"q_proj.weight": new.q_weight, "k_proj.weight": new.k_weight, "mixing": new.mixing}
        student.load_state_dict({**kept, **parts, "query_bias": new.query_bias, "pick": new.pick})
        found[name] = Student(student.requires_grad_(False), whitenings and whitenings[name])
    return found


@pytest.fixture(params=(False, True), ids=("plain", "whitened"))
def students(model, request):
    moments = collect_moments(model, progress=False)
    return converted(model, R, {n: Whitening.of(*pair) for n, pair in moments.items()} if request.param else None)


def modules(students):
    return {name: student.module for name, student in students.items()}


def mean_errors(model, students):
    sums = dict.fromkeys(students, 0.0)

    def see(one):
        sums[one.name] += output_error(students[one.name].module, one).item() / len(model.batches(True))

    for batch in model.batches(True):
        model.observe(batch, see)
    return sums


def test_moments_are_collected_by_attention_and_without_padding(model):
    moments = collect_moments(model, progress=False)
    tokens = torch.cat(model.text[False] + model.text[True])
    assert {name: query.count for name, (query, _) in moments.items()} == dict.fromkeys(
        ("first", "second"), int((tokens != 0).sum())
    )
    torch.testing.assert_close(moments["first"][0].mean, model.embed(tokens)[tokens != 0].double().mean(0))
    assert not torch.allclose(moments["first"][0].mean, moments["second"][0].mean)


def test_a_model_that_computes_nan_is_named(model):
    model.embed.weight.data[3] = float("nan")
    with pytest.raises(CollabError, match="the inputs of first on the calibration text are NaN"):
        collect_moments(model, progress=False)


def test_refinement_brings_every_layer_closer_on_text_it_has_not_seen(model, students):
    before = mean_errors(model, students)
    reported = refine.refine_layers(model, students, 60, progress=False)
    after = mean_errors(model, students)
    for name in students:
        assert reported[name] == pytest.approx((before[name], after[name]), rel=1e-5)
        assert after[name] < before[name]


def test_only_what_conversion_made_is_trained(model, students):
    before = {(n, k): v.clone() for n, s in students.items() for k, v in s.module.state_dict().items()}
    refine.refine_layers(model, students, 5, progress=False)
    changed = {key for (name, key), v in before.items() if not torch.equal(students[name].module.state_dict()[key], v)}
    assert changed == CONVERTED


@pytest.mark.parametrize("rate", (30.0, float("nan")))
def test_training_that_goes_wrong_leaves_what_was_there(model, students, monkeypatch, rate):
    monkeypatch.setattr(refine, "LEARNING_RATE", rate)
    monkeypatch.setattr(refine, "DISTILL_LEARNING_RATE", rate)
    before = {name: {k: v.clone() for k, v in s.module.state_dict().items()} for name, s in students.items()}
    refine.refine_layers(model, students, 20, progress=False)
    refine.distill(
        model, lambda batch: model.run(batch, modules(students)), list(students.values()), 20, progress=False
    )
    for name, student in students.items():
        assert all(torch.equal(value, before[name][key]) for key, value in student.module.state_dict().items())


def test_distillation_brings_predictions_closer(model, students):
    def divergence():
        with torch.no_grad():
            found = [(model.log_probs(b), model.run(b, modules(students))) for b in model.batches(True)]
        return sum((p.exp() * (p - q)).sum(-1).mean().item() for p, q in found) / len(found)

    before = divergence()
    reported = refine.distill(
        model, lambda b: model.run(b, modules(students)), list(students.values()), 60, progress=False
    )
    assert reported == pytest.approx((before, divergence()), rel=1e-4)
    assert reported[1] < reported[0]


def test_distillation_learns_from_noisy_text_and_is_judged_on_clean_text(model, students):
    seen = []

    def student(batch):
        seen.append((torch.is_grad_enabled(), batch))
        return model.run(batch, modules(students))

    refine.distill(model, student, list(students.values()), 8, progress=False)
    assert len(model.noised) == 8 and all(any(one is batch for batch in model.text[False]) for one in model.noised)
    assert all(bool((batch == 1).any()) is not training for training, batch in seen)
    model.noised.clear()
    refine.refine_layers(model, students, 4, progress=False)
    assert not model.noised, "layers learn from text as it is"


def test_training_ends_when_held_out_text_gains_no_more(model, students, monkeypatch):
    steps = []
    monkeypatch.setattr(refine, "LEARNING_RATE", 1e6)
    observe = model.observe

    def counted(batch, see):
        steps.append(any(batch is one for one in model.text[False]))
        observe(batch, see)

    monkeypatch.setattr(model, "observe", counted)
    refine.refine_layers(model, students, 100, progress=False)
    assert sum(steps) == 25, "five checks without a gain, five steps apart"


def test_exact_layers_stay_exact(model):
    whitenings = {name: Whitening.of(*pair) for name, pair in collect_moments(model, progress=False).items()}
    errors = refine.refine_layers(model, converted(model, D, whitenings), 10, progress=False)
    assert all(after <= before < 1e-10 for before, after in errors.values())
