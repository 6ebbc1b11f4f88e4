"""Exported models outside fairseq: CTranslate2's own converter for fairseq takes them and translates alike.

That exported models are stock fairseq's is tested beside the converter, in `test_convert.py`.
"""

import pytest
import torch

from fairseq_collab.cli.convert import main

ctranslate2 = pytest.importorskip("ctranslate2")

BEAM = 4


@pytest.fixture(scope="module")
def serve(plugin, plugin_dir, toy_data, tmp_path_factory):
    """`serve(CHECKPOINT, STOCK)` exports it to STOCK, converts that for CTranslate2 and returns the translator."""

    def run(checkpoint, stock):
        folder = tmp_path_factory.mktemp("served")
        assert main(["--to-concatenated", "--path", str(checkpoint), "--output", str(stock)]) == 0
        converter = ctranslate2.converters.FairseqConverter(str(stock), str(toy_data), user_dir=str(plugin_dir))
        converter.convert(str(folder / "served"))
        return ctranslate2.Translator(str(folder / "served"), device="cpu", intra_threads=1)

    return run


def pairs_of(done):
    """Source and best hypothesis, as lists of tokens, of every test sentence."""
    sources, hypotheses = done.lines("S"), done.hypotheses()
    assert len(sources) == len(hypotheses) == 30
    return [(sources[number][0].split(), hypotheses[number][0].split()) for number in sorted(sources)]


@pytest.fixture(scope="module")
def fairseq_translations(generate, window_model):
    return pairs_of(generate(window_model / "checkpoint_last.pt", "--beam", BEAM))


def translate(translator, pairs):
    done = translator.translate_batch([source for source, _ in pairs], beam_size=BEAM, max_decoding_length=200)
    return [result.hypotheses[0] for result in done]


def test_a_served_window_model_translates_as_fairseq_does(serve, fairseq_translations, window_model, tmp_path):
    served = serve(window_model / "checkpoint_last.pt", tmp_path / "stock.pt")
    translations = translate(served, fairseq_translations)
    assert translations == [hypothesis for _, hypothesis in fairseq_translations]
    assert len(set(map(tuple, translations))) > 20


def test_a_model_whose_options_lack_those_of_its_task_is_served_too(
    serve, fairseq_translations, window_model, tmp_path
):
    """Hydra keeps the options of the task apart from those of the model."""
    state = torch.load(window_model / "checkpoint_last.pt")
    for key in ("task", *state["cfg"]["task"]):
        if key != "_name" and hasattr(state["cfg"]["model"], key):
            delattr(state["cfg"]["model"], key)
    torch.save(state, tmp_path / "hydra.pt")
    translations = translate(serve(tmp_path / "hydra.pt", tmp_path / "stock.pt"), fairseq_translations)
    assert translations == [hypothesis for _, hypothesis in fairseq_translations]


def test_a_dense_model_is_served_as_closely_as_ordinary_heads_can(serve, generate, dense_model, tmp_path, capsys):
    """The 16 shared dims would fit into the toy model's heads of 16 dims, so it gets twice as many heads of 8."""
    state = torch.load(dense_model / "checkpoint_last.pt")
    for key, heads in (("encoder_attention_heads", 8), ("decoder_attention_heads", 8)):
        setattr(state["cfg"]["model"], key, heads)
    for key in [key for key in state["model"] if key.endswith(("mixing", "query_bias"))]:
        state["model"][key] = state["model"][key].repeat_interleave(2, dim=0)
    torch.save(state, tmp_path / "dense.pt")
    served = serve(tmp_path / "dense.pt", tmp_path / "stock.pt")
    printed = capsys.readouterr().out
    assert "signature: conv:svd|to:concatenated" in printed
    errors = [float(line.split()[5]) for line in printed.splitlines() if "attn " in line]
    assert len(errors) == 6 and all(0 < error < 0.6 for error in errors)
    stock = pairs_of(generate(tmp_path / "stock.pt", "--beam", BEAM))
    assert translate(served, stock) == [hypothesis for _, hypothesis in stock]
