"""What must agree when a model decodes: one step at a time and all at once, small and large batches, scripted and not.

Models are built in the process of the tests, through the command-line parser. Commands are in `test_commands.py`.
"""

import copy
import math
from itertools import combinations

import pytest
import torch
from _tools import DENSE, SMALL, WINDOW, attentions, build

ATTENTIONS = ("encoder", "cross", "decoder")
SUBSETS = ["_".join(subset) or "none" for size in range(4) for subset in combinations(ATTENTIONS, size)]
LAYOUTS = {
    "dense": ("--key-dim", 16),
    "window": ("--key-dim", 16, "--mix-dim", 8, "--mix-layout", "window"),
    "picked": ("--key-dim", 20, "--mix-dim", 7, "--mix-layout", "picked"),
}
PAD = 1


def random_model(plugin, *flags):
    """A model in which no weight is at the value that it starts with, such as biases of 0."""
    torch.manual_seed(1)
    model = build(plugin, (*SMALL, *flags)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def random_batch(beam=1, target_length=7):
    """Three source sentences with padding on the left, their lengths, and target tokens as the decoder takes them.

    Every sentence comes `beam` times in a row, each time with another target.
    """
    generator = torch.Generator().manual_seed(2)
    source = torch.randint(4, 24, (3, 6), generator=generator)
    source[1, :2] = PAD
    source[2, :4] = PAD
    source = source.repeat_interleave(beam, 0)
    target = torch.randint(4, 24, (3 * beam, target_length), generator=generator)
    target[:, 0] = 2
    return source, source.ne(PAD).sum(1), target


def stepwise(decoder, encoder_out, target):
    """The decoder's output (B, T, words) from one token at a time for two beams a sentence.

    On the way beams change places, and then the first sentence is finished: its last steps stay 0.
    """
    state: dict = {}
    rows = torch.arange(len(target))
    result = None
    for length in range(1, target.size(1) + 1):
        order = {4: [1, 0, 2, 3, 5, 4], 6: [2, 3, 4, 5]}.get(length)
        if order is not None:
            decoder.reorder_incremental_state_scripting(state, torch.tensor(order))
            rows = rows[order]
            if encoder_out is not None:
                encoder_out = {
                    "encoder_out": [encoder_out["encoder_out"][0][:, order]],
                    "encoder_padding_mask": [encoder_out["encoder_padding_mask"][0][order]],
                }
        step, _ = decoder(target[rows, :length], encoder_out=encoder_out, incremental_state=state)
        if result is None:
            result = step.new_zeros(*target.shape, step.size(-1))
        result[rows, length - 1] = step[:, 0]
    return result


def assert_steps_agree_with_all_at_once(model, has_encoder=True):
    source, lengths, target = random_batch(beam=2)
    outputs = {}
    with torch.no_grad():
        exact = copy.deepcopy(model).double()
        encoded = exact.encoder(source, lengths) if has_encoder else None
        reference, _ = exact.decoder(target, encoder_out=encoded)
        encoded = model.encoder(source, lengths) if has_encoder else None
        outputs["full"], _ = model.decoder(target, encoder_out=encoded)
        outputs["steps"] = stepwise(model.decoder, encoded, target)
    for output in (reference, *outputs.values()):
        output[:2, 5:] = 0
    error = {name: (output.double() - reference).abs().max().item() for name, output in outputs.items()}
    size = reference.abs().max().item()
    assert size > 0.1
    assert error["steps"] <= 2 * error["full"] + 1e-6 * size, error


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", SUBSETS)
def test_one_step_at_a_time_agrees_with_all_at_once(plugin, heads, layout):
    assert_steps_agree_with_all_at_once(random_model(plugin, "--collaborative-heads", heads, *LAYOUTS[layout]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "flags",
    [
        ("--cross-self-attention",),
        ("--no-cross-attention",),
        ("--cross-self-attention", "--no-cross-attention"),
        ("--decoder-normalize-before", "--encoder-normalize-before"),
        ("--encoder-embed-dim", 32, "--encoder-key-dim", 8, "--encoder-attention-heads", 2, "--cross-key-dim", 24),
        ("--quant-noise-pq", 0.1, "--quant-noise-pq-block-size", 4),
    ],
    ids=lambda flags: flags[0].strip("-"),
)
def test_steps_agree_with_all_at_once_under_other_options(plugin, flags, layout):
    if "--encoder-embed-dim" in flags and layout != "dense":
        flags = flags[:2]
    assert_steps_agree_with_all_at_once(random_model(plugin, *LAYOUTS[layout], *flags))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_of_a_language_model_agree_with_all_at_once(plugin, layout):
    flags = ("--arch", "transformer_lm_collab_gpt2_tiny", "--task", "language_modeling", "--tokens-per-sample", 32)
    torch.manual_seed(1)
    model = build(plugin, (*flags, "--decoder-attention-heads", 4, *LAYOUTS[layout])).eval()
    assert_steps_agree_with_all_at_once(model, has_encoder=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_source_of_padding_alone_changes_no_other_sentence(plugin, layout):
    model = random_model(plugin, *LAYOUTS[layout])
    source, lengths, target = random_batch()
    with torch.no_grad():
        expected, _ = model(source[:2], lengths[:2], target[:2])
        source[2] = PAD
        found, _ = model(source, lengths, target)
    assert found.isfinite().all()
    torch.testing.assert_close(found[:2], expected)


@pytest.mark.parametrize("flags", [DENSE[2:], WINDOW[2:]], ids=["dense", "window"])
def test_every_attention_runs_our_forward_in_eval_mode(plugin, monkeypatch, flags):
    from fairseq_collab.fairseq_modules.multihead_attention import CollaborativeMultiheadAttention

    called = []
    forward = CollaborativeMultiheadAttention.forward
    monkeypatch.setattr(
        CollaborativeMultiheadAttention,
        "forward",
        lambda self, *args, **kwargs: called.append(self) or forward(self, *args, **kwargs),
    )
    model = random_model(plugin, *flags)
    source, lengths, target = random_batch()
    with torch.no_grad():
        model(source, lengths, target)
    assert sorted(map(id, called)) == sorted(map(id, attentions(model).values()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mixing_and_query_bias_reach_the_output_of_every_attention(plugin, layout):
    model = random_model(plugin, *LAYOUTS[layout])
    source, lengths, target = random_batch()
    model(source, lengths, target)[0].pow(2).sum().backward()
    for name, module in attentions(model).items():
        for parameter in ("mixing", "query_bias", "q_proj.weight", "k_proj.weight"):
            assert module.get_parameter(parameter).grad.abs().max() > 0, (name, parameter)


@pytest.mark.parametrize("name", ["dense_model", "window_model"])
@pytest.mark.parametrize("beam", [1, 5])
def test_batches_of_1_and_32_give_the_same_hypotheses(request, generate, name, beam):
    path = request.getfixturevalue(name) / "checkpoint_last.pt"
    single, batched = (
        generate(path, "--batch-size", size, "--beam", beam, "--max-len-b", 20).hypotheses() for size in (1, 32)
    )
    assert set(single) == set(batched) == set(range(30))
    assert len({text for text, _ in single.values()}) > 20
    for number, (text, score) in single.items():
        other_text, other_score = batched[number]
        total, other = (
            value * (len(words.split()) + 1) * math.log(2)
            for value, words in ((score, text), (other_score, other_text))
        )
        assert abs(total - other) < 1e-4, number


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    "flags",
    [LAYOUTS["dense"], LAYOUTS["window"], LAYOUTS["picked"], ("--collaborative-heads", "none", "--key-dim", 16)],
    ids=[*LAYOUTS, "concatenated"],
)
def test_a_scripted_model_gives_the_same_outputs_and_survives_a_file(plugin, tmp_path, flags):
    model = random_model(plugin, *flags)
    source, lengths, target = random_batch()
    torch.jit.script(model).save(tmp_path / "model.ts")
    scripted = torch.jit.load(tmp_path / "model.ts")
    with torch.no_grad():
        torch.testing.assert_close(scripted(source, lengths, target)[0], model(source, lengths, target)[0])


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("name", ["dense_model", "window_model"])
def test_scripted_beam_search_finds_the_same_hypotheses(request, load, plugin, name):
    from fairseq.data import Dictionary
    from fairseq.sequence_generator import SequenceGenerator

    (model,) = load(request.getfixturevalue(name) / "checkpoint_last.pt")
    dictionary = Dictionary.load(str(request.getfixturevalue("toy_data") / "dict.tgt.txt"))
    source, lengths, _ = random_batch()
    sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}
    with torch.no_grad():
        generator = SequenceGenerator([model], dictionary, beam_size=3, max_len_b=10)
        expected = generator(sample)
        found = torch.jit.script(generator)(sample)
    for ours, theirs in zip(found, expected, strict=True):
        assert [hypo["tokens"].tolist() for hypo in ours] == [hypo["tokens"].tolist() for hypo in theirs]


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_language_model_scripts_as_the_stock_one_does(plugin):
    task = ("--task", "language_modeling", "--tokens-per-sample", 32)
    stock = build(plugin, ("--arch", "transformer_lm_gpt2_tiny", *task)).eval()
    ours = build(plugin, ("--arch", "transformer_lm_collab_gpt2_tiny", *task)).eval()
    _, _, target = random_batch()
    for model in (stock, ours):
        scripted = torch.jit.script(model.decoder)
        with torch.no_grad():
            torch.testing.assert_close(scripted(target)[0], model.decoder(target)[0])
