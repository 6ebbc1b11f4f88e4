"""Which models the converter knows, what their weights were called, and the flags that describe them."""

from argparse import Namespace

import pytest
import torch

from fairseq_collab.adapters import fairseq_options, fairseq_task
from fairseq_collab.adapters import fairseq_transformer as adapter

TASKS = {"transformer_lm": "language_modeling", "roberta": "masked_lm"}


def options_of(arch: str, task: str, *flags: str) -> Namespace:
    """What a command line with this architecture sets."""
    from fairseq import options

    import fairseq_collab.models  # noqa: F401 (registers the architectures)

    parser = options.get_training_parser(default_task=task)
    return options.parse_args_and_arch(parser, ["DATA", "--task", task, "--arch", arch, *flags])


@pytest.mark.parametrize(
    ("arch", "name"),
    (
        *((name, "transformer") for name in ("transformer", "transformer_collab_tiny", "transformer_wmt_en_de_big")),
        *(
            (name, "transformer_lm")
            for name in ("transformer_lm", "transformer_lm_collab", "transformer_lm_gpt3_small")
        ),
        *(
            (name, "roberta")
            for name in ("roberta", "roberta_collab", "roberta_large", "roberta_collab_prenorm", "xlm")
        ),
        *((name, "roberta") for name in ("xlm_collab", "roberta_base")),
        *((name, "bart") for name in ("bart_large", "bart_collab_base", "mbart_large", "mbart_collab_base_wmt20")),
        *(
            (name, None)
            for name in ("roberta_enc_dec", "transformer_align", "lstm", "data2vec_roberta", "bart", "xlmr")
        ),
    ),
)
def test_architectures_are_told_apart(arch, name):
    assert adapter.model_name(Namespace(arch=arch)) == name
    assert adapter.model_name(Namespace(_name=arch)) == name


def test_every_stock_preset_of_the_families_is_known():
    import fairseq.models

    import fairseq_collab.models  # noqa: F401

    registered = fairseq.models.ARCH_MODEL_NAME_REGISTRY
    for arch, model in registered.items():
        model = model.replace("_collab", "")
        if model in adapter.FAMILIES:
            assert adapter.model_name(Namespace(arch=arch)) == model, arch


def test_old_names_of_weights_become_those_of_today():
    weight = torch.arange(12.0).view(6, 2)
    state = {
        "decoder.sentence_encoder.layers.0.self_attn.in_proj_weight": weight,
        "decoder.sentence_encoder.emb_layer_norm.weight": weight,
        "decoder.lm_head.bias": weight,
        "encoder.sentence_encoder.layers.0.fc1_weight": weight,
        "classification_heads.mnli.dense.bias": weight,
    }
    adapter.upgrade_names(state, "roberta")
    prefix = "encoder.sentence_encoder.layers.0.self_attn"
    assert set(state) == {
        *(f"{prefix}.{part}_proj.weight" for part in "qkv"),
        *("encoder.sentence_encoder.layernorm_embedding.weight", "encoder.lm_head.bias"),
        "classification_heads.mnli.dense.bias",
    }
    assert torch.equal(state[f"{prefix}.k_proj.weight"], weight[2:4])
    again = dict(state)
    adapter.upgrade_names(again, "roberta")
    assert again == state


def test_names_that_only_roberta_had_are_left_alone_elsewhere():
    state = {"decoder.layers.0.fc1.weight": torch.zeros(1)}
    adapter.upgrade_names(state, "bart")
    assert list(state) == ["decoder.layers.0.fc1.weight"]


@pytest.mark.parametrize(
    ("name", "arch"), [(name, arch) for name, archs in fairseq_options.DEFAULTS.items() for arch in archs]
)
def test_the_defaults_that_flags_are_left_out_for_are_fairseq_s(name, arch):
    options = options_of(arch, TASKS.get(name, "translation"))
    defaults = fairseq_options.DEFAULTS[name][arch]
    found = {key: getattr(options, key, default) for key, default in defaults.items()}
    assert {key: value or None for key, value in found.items()} == {k: v or None for k, v in defaults.items()}
    flags = fairseq_options.architecture_flags(options, name)
    assert flags[:2] == ["--arch", arch] and len(flags) == 2


@pytest.mark.parametrize(
    ("stock", "task"),
    (
        *(("bart_base", "translation"), ("mbart_large", "translation"), ("mbart_base_wmt20", "translation")),
        *(("roberta_large", "masked_lm"), ("roberta_prenorm", "masked_lm"), ("xlm", "masked_lm")),
        *(("transformer_wmt_en_de_big", "translation"), ("transformer_lm_gpt", "language_modeling")),
    ),
)
@pytest.mark.parametrize(
    "more", ((), ("--encoder-ffn-embed-dim", "512")), ids=("as they are", "with another feed-forward")
)
def test_flags_bring_an_architecture_to_the_options_of_another(stock, task, more):
    more = tuple(flag.replace("encoder", "decoder") if "_lm" in stock else flag for flag in more)
    options = options_of(stock, task, *more)
    name = adapter.model_name(options)
    arch, *flags = fairseq_options.architecture_flags(options, name)[1:]
    again = options_of(arch, task, *flags)
    for key in fairseq_options.DEFAULTS[name][arch]:
        assert (getattr(again, key, None) or None) == (getattr(options, key, None) or None), key


def test_a_side_that_follows_the_other_is_named_where_the_other_is():
    options = options_of(
        "bart_large", "translation", "--encoder-ffn-embed-dim", "64", "--decoder-ffn-embed-dim", "4096"
    )
    flags = fairseq_options.architecture_flags(options, "bart")
    assert flags[flags.index("--decoder-ffn-embed-dim") + 1] == "4096"


def test_tasks_are_named_with_what_they_cannot_do_without():
    options = Namespace(_name="sentence_prediction", num_classes=3, regression_target=False, init_token=0)
    assert fairseq_task.task_flags(options) == [
        *("--task", "sentence_prediction", "--criterion", "sentence_prediction"),
        *("--num-classes", "3", "--init-token", "0"),
    ]
    assert fairseq_task.task_flags(Namespace(task="translation")) == []
    mbart = Namespace(task="translation_from_pretrained_bart", langs="de_DE,en_XX")
    assert fairseq_task.added_symbols(mbart) == ["[de_DE]", "[en_XX]", "<mask>"]
    assert fairseq_task.added_symbols(Namespace(_name="translation")) == []
