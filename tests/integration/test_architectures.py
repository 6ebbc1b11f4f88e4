"""Every architecture has the dims of its preset, from the command line, through Hydra and from a checkpoint.

Each option that changes those dims is here too. Training and decoding with them is in the other modules.
"""

import json
import math

import pytest
import torch
from _stock import skip_where_stock_fails
from _tools import SMALL, attentions, build, key_dims, train_flags

# name: embed dim, feed-forward dim, heads, encoder layers (0 in a language model), decoder layers (0 in a RoBERTa)
PUBLISHED = {
    "transformer_collab": (512, 2048, 8, 6, 6),
    "transformer_collab_tiny": (64, 64, 2, 2, 2),
    "transformer_collab_iwslt_de_en": (512, 1024, 4, 6, 6),
    "transformer_collab_wmt_en_de": (512, 2048, 8, 6, 6),
    "transformer_collab_wmt_en_de_big": (1024, 4096, 16, 6, 6),
    "transformer_collab_vaswani_wmt_en_de_big": (1024, 4096, 16, 6, 6),
    "transformer_collab_vaswani_wmt_en_fr_big": (1024, 4096, 16, 6, 6),
    "transformer_collab_wmt_en_de_big_t2t": (1024, 4096, 16, 6, 6),
    "transformer_lm_collab": (512, 2048, 8, 0, 6),
    "transformer_lm_collab_big": (1024, 4096, 16, 0, 12),
    "transformer_lm_collab_baevski_wiki103": (1024, 4096, 8, 0, 16),
    "transformer_lm_collab_wiki103": (1024, 4096, 8, 0, 16),
    "transformer_lm_collab_baevski_gbw": (512, 4096, 16, 0, 12),
    "transformer_lm_collab_gbw": (512, 4096, 16, 0, 12),
    "transformer_lm_collab_gpt": (768, 3072, 12, 0, 12),
    "transformer_lm_collab_gpt2_small": (1024, 4096, 16, 0, 24),
    "transformer_lm_collab_gpt2_tiny": (64, 64, 1, 0, 2),
    "transformer_lm_collab_gpt2_medium": (1280, 5120, 20, 0, 36),
    "transformer_lm_collab_gpt2_big": (1600, 6400, 25, 0, 48),
    "roberta_collab": (768, 3072, 12, 12, 0),
    "roberta_collab_base": (768, 3072, 12, 12, 0),
    "roberta_collab_prenorm": (768, 3072, 12, 12, 0),
    "roberta_collab_large": (1024, 4096, 16, 24, 0),
    "xlm_collab": (1280, 5120, 16, 16, 0),
    "bart_collab_base": (768, 3072, 12, 6, 6),
    "bart_collab_large": (1024, 4096, 16, 12, 12),
    "mbart_collab_base": (768, 3072, 12, 6, 6),
    "mbart_collab_large": (1024, 4096, 16, 12, 12),
    "mbart_collab_base_wmt20": (768, 3072, 12, 6, 6),
}
COPIED = ("transformer", "transformer_lm", "roberta", "bart")  # the models of fairseq that have a counterpart
TASK = {
    "transformer_lm": ("--task", "language_modeling", "--tokens-per-sample", 128),
    "roberta": ("--task", "masked_lm", "--tokens-per-sample", 128),
}


def flags_of(name: str) -> tuple:
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY

    return ("--arch", name, *TASK.get(ARCH_MODEL_NAME_REGISTRY[name].replace("_collab", ""), ()))


def options_of(name: str) -> dict:
    """The options of an architecture as the command-line parser leaves them, without the plugin's own."""
    from fairseq import options

    from fairseq_collab.fairseq_modules.options import FLAGS

    flags = [str(flag) for flag in ("DATA", *flags_of(name))]
    args = vars(options.parse_args_and_arch(options.get_training_parser(), flags))
    return {key: value for key, value in args.items() if key not in (*FLAGS, "arch")}


def registered(suffix: str = "_collab") -> list[str]:
    """The architectures of our models, or with the suffix "" of fairseq's own."""
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY

    models = {name + suffix for name in COPIED}
    return sorted(arch for arch, model in ARCH_MODEL_NAME_REGISTRY.items() if model in models)


def stock_of(name: str) -> str:
    return name.replace("_collab", "")


def test_every_stock_preset_of_the_same_models_has_a_collaborative_one(plugin):
    assert set(PUBLISHED) <= set(registered())
    assert set(registered("")) == set(map(stock_of, registered()))


def test_every_preset_has_the_options_of_the_stock_one(plugin):
    for name in registered():
        if name != "transformer_lm_collab":
            assert options_of(name) == options_of(stock_of(name)), name


def test_the_language_model_without_a_preset_has_the_defaults_of_the_stock_one(plugin):
    from fairseq.models.transformer_lm import TransformerLanguageModelConfig

    stock, ours = vars(TransformerLanguageModelConfig()), options_of("transformer_lm_collab")
    common = [key for key in stock if key in ours and not str(stock[key]).startswith("${")]
    common.remove("base_shuffle")  # of mixture-of-experts layers, and 1 in one place of fairseq, False in another
    assert len(common) > 30
    assert {key: ours[key] for key in common} == {key: stock[key] for key in common}


@pytest.fixture
def no_initialisation(plugin, monkeypatch):
    """BERT's initialisation copies weights to the CPU, which those of the device `meta` are not on."""
    for module in ("fairseq.models.roberta.model", "fairseq.models.bart.model", "fairseq_collab.models.roberta"):
        monkeypatch.setattr(f"{module}.init_bert_params", lambda module: None)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_really_builds_its_dims(plugin, no_initialisation, name):
    width, inner, heads, encoder_layers, decoder_layers = PUBLISHED[name]
    model = build(plugin, flags_of(name), words=60_001, device="meta")
    found = attentions(model)
    sides = {"encoder": encoder_layers, "cross": decoder_layers if encoder_layers else 0, "decoder": decoder_layers}
    assert sorted(found) == sorted(f"{side}.{layer}" for side, layers in sides.items() for layer in range(layers))
    for module in found.values():
        assert module.q_proj.weight.shape == module.k_proj.weight.shape == (width // 4, width)
        assert module.v_proj.weight.shape == module.out_proj.weight.shape == (width, width)
        assert module.mixing.shape == module.query_bias.shape == (heads, width // 4)
        assert module.scale == pytest.approx(1 / math.sqrt(width / heads))
    layers = [module for module in model.modules() if hasattr(module, "fc1")]
    assert len(layers) == encoder_layers + decoder_layers
    assert all(layer.fc1.weight.shape == (inner, width) for layer in layers)


@pytest.mark.parametrize(
    ("flags", "encoder", "cross", "decoder"),
    [
        ((), (16, True), (16, True), (16, True)),
        (("--key-dim", 32), (32, True), (32, True), (32, True)),
        (("--encoder-key-dim", 8), (8, True), (16, True), (16, True)),
        (("--key-dim", 32, "--cross-key-dim", 12), (32, True), (12, True), (32, True)),
        (("--decoder-key-dim", 20), (16, True), (16, True), (20, True)),
        (("--collaborative-heads", "encoder_cross"), (16, True), (16, True), (64, False)),
        (("--collaborative-heads", "cross,decoder"), (64, False), (16, True), (16, True)),
        (("--collaborative-heads", "encoder", "--key-dim", 32), (32, True), (32, False), (32, False)),
        (("--collaborative-heads", "none"), (64, False), (64, False), (64, False)),
        (("--collaborative-heads", "none", "--key-dim", 16), (16, False), (16, False), (16, False)),
    ],
)
def test_flags_choose_the_attentions_and_their_key_dims(plugin, flags, encoder, cross, decoder):
    found = attentions(build(plugin, (*SMALL, *flags)))
    for name, (key_dim, collaborative) in {"encoder": encoder, "cross": cross, "decoder": decoder}.items():
        for layer in (0, 1):
            module = found[f"{name}.{layer}"]
            assert module.q_proj.weight.shape == module.k_proj.weight.shape == (key_dim, 64), name
            assert (getattr(module, "mixing", None) is not None) == collaborative, name


def test_heads_that_stay_concatenated_at_full_width_are_fairseqs_own(plugin):
    from fairseq.modules import MultiheadAttention

    found = attentions(build(plugin, (*SMALL, "--collaborative-heads", "cross")))
    assert {name for name, module in found.items() if type(module) is MultiheadAttention} == {
        *("encoder.0", "encoder.1", "decoder.0", "decoder.1")
    }


def test_different_widths_of_encoder_and_decoder_give_each_attention_a_quarter_of_its_own(plugin):
    model = build(plugin, (*SMALL, "--encoder-embed-dim", 32, "--decoder-embed-dim", 64))
    assert key_dims(model) == {
        **{f"encoder.{layer}": 8 for layer in (0, 1)},
        **{f"{name}.{layer}": 16 for name in ("cross", "decoder") for layer in (0, 1)},
    }
    assert attentions(model)["cross.0"].k_proj.weight.shape == (16, 32)


def test_a_configuration_file_sets_every_layer_and_the_checkpoint_keeps_it(
    fairseq, train, generate, load, toy_data, plugin_dir, tmp_path
):
    config = {
        "encoder": [{"key_dim": 16}, {"key_dim": 24, "mix_dim": 12, "mix_layout": "picked", "scale": 0.3}],
        "cross": {"key_dim": 32, "mix_dim": 16},
        "decoder": [{"collaborative": False}, {"key_dim": 8}],
    }
    dims = {"encoder.0": 16, "encoder.1": 24, "cross.0": 32, "cross.1": 32, "decoder.0": 64, "decoder.1": 8}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    folder = train("config", *SMALL, "--collab-config", file)
    file.unlink()

    generate(folder / "checkpoint_last.pt", "--beam", 2)
    (model,) = load(folder / "checkpoint_last.pt")
    assert key_dims(model) == dims
    found = attentions(model)
    assert found["encoder.1"].mix_layout == "picked" and found["encoder.1"].scale == 0.3
    assert found["cross.0"].mix_layout == "window" and found["cross.0"].mix_dim == 16
    assert not hasattr(found["decoder.0"], "mixing")

    again = train("config_again", *SMALL, "--collab-config", folder / "checkpoint_last.pt", "--seed", 2)
    (other,) = load(again / "checkpoint_last.pt")
    assert key_dims(other) == dims
    assert not torch.equal(other.encoder.layers[0].fc1.weight, model.encoder.layers[0].fc1.weight)

    fairseq(
        "train",
        *(toy_data, "--user-dir", plugin_dir, "--save-dir", folder, *train_flags(), *SMALL),
        *("--collab-config", folder / "checkpoint_last.pt", "--max-epoch", 2),
    )
    assert key_dims(load(folder / "checkpoint_last.pt")[0]) == dims


def test_a_checkpoint_gives_back_picks_that_its_options_alone_would_not(train, load):
    folder = train("picked", *SMALL, "--key-dim", 16, "--mix-dim", 8, "--mix-layout", "picked")
    path = folder / "checkpoint_last.pt"
    state = torch.load(path, weights_only=True)
    pick = state["model"]["encoder.layers.1.self_attn.pick"]
    pick.copy_(pick.flip(0))
    torch.save(state, path)
    assert torch.equal(attentions(load(path)[0])["encoder.1"].pick, pick)


@pytest.mark.parametrize("way", ("one by one", "at once"))
def test_hydra_gives_the_preset_and_its_overrides(run_fairseq, generate, load, toy_data, plugin_dir, tmp_path, way):
    model = {"_name": "transformer_collab_tiny", "key_dim": 32, "encoder_key_dim": 24}
    model |= {"decoder_layers": 3, "collaborative_heads": "encoder_cross"}
    if way == "one by one":
        skip_where_stock_fails("hydra +model.NAME")
        described = [f"+model.{name}={value}" for name, value in model.items()]
    else:
        # fairseq 0.12.2 asks every model how many base layers it has
        described = ["+model={" + ",".join(f"{name}:{value}" for name, value in model.items()) + ",base_layers:0}"]
    run_fairseq(
        "hydra-train",
        *(f"common.user_dir={plugin_dir}", "common.cpu=true", "common.log_format=simple"),
        *("task=translation", f"task.data={toy_data}", "task.source_lang=src", "task.target_lang=tgt"),
        *("criterion=cross_entropy", "optimizer=adam", "optimizer.lr=[0.005]", "optimization.lr=[0.005]"),
        *("lr_scheduler=fixed", "optimization.max_epoch=1", "dataset.max_tokens=800", "dataset.num_workers=0"),
        *(*described, f"checkpoint.save_dir={tmp_path}", f"hydra.run.dir={tmp_path}/hydra"),
    )
    (model,) = load(tmp_path / "checkpoint_last.pt")
    assert key_dims(model) == {
        **{f"encoder.{layer}": 24 for layer in range(2)},
        **{f"{name}.{layer}": 32 for name in ("cross", "decoder") for layer in range(3)},
    }
    found = attentions(model)
    assert found["cross.0"].mixing.shape == (2, 32)
    assert found["decoder.0"].num_heads == 2 and found["decoder.0"].embed_dim == 64
    assert found["decoder.0"].mixing is None
    assert len(generate(tmp_path / "checkpoint_last.pt").hypotheses()) == 30


def test_hydra_takes_nested_options_too(plugin):
    from omegaconf import OmegaConf

    cfg = OmegaConf.create({"_name": "transformer_collab_tiny", "encoder": {"layers": 3}, "cross_key_dim": 8})
    from fairseq.data import Dictionary
    from fairseq.models import build_model

    class Task:
        source_dictionary = target_dictionary = Dictionary()

    dims = key_dims(build_model(cfg, Task))
    assert dims == {
        **{f"encoder.{i}": 16 for i in range(3)},
        **{f"cross.{i}": 8 for i in (0, 1)},
        **{f"decoder.{i}": 16 for i in (0, 1)},
    }
