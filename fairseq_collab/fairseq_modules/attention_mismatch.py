"""Which attentions a state dict holds, and the sentence for a checkpoint that does not fit the model.

Only names and shapes are looked at. An attention `PREFIX` is collaborative when the state dict has `PREFIX.mixing`
(H, P) and `PREFIX.query_bias` beside `PREFIX.q_proj.weight` (R, D), with picked mixing when there is `PREFIX.pick` too.
It is concatenated when there is `PREFIX.q_proj.bias` or, in checkpoints of old fairseq versions,
`PREFIX.in_proj_weight`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from fairseq_collab.adapters.fairseq_transformer import upgrade_names
from fairseq_collab.errors import CollabError, one_a_line

_SIZES = re.compile(
    r"size mismatch for (\S+): copying a param with shape torch\.Size\(\[([\d, ]*)\]\) from checkpoint, "
    r"the shape in current model is torch\.Size\(\[([\d, ]*)\]\)"
)
# learned positions begin after the padding index, 1
_BEFORE_POSITIONS = 2
_POSITION_FLAGS = {
    "encoder.sentence_encoder": "--max-positions",
    "encoder": "--max-source-positions",
    "decoder": "--max-target-positions",
}


class AttentionShape(NamedTuple):
    """`key_dim` is R, or H*K of concatenated heads; `mix_dim` is P, or None for concatenated heads."""

    key_dim: int
    mix_dim: int | None
    picked: bool = False

    @property
    def collaborative(self) -> bool:
        """Whether the heads share their keys."""
        return self.mix_dim is not None

    @property
    def mix_layout(self) -> str | None:
        """The layout that `--mix-layout` would name; None for concatenated heads."""
        if not self.collaborative:
            return None
        return "picked" if self.picked else "dense" if self.mix_dim == self.key_dim else "window"


def attention_shapes(state_dict: Mapping[str, Any]) -> dict[str, AttentionShape]:
    """The attentions in `state_dict` by prefix, e.g. `decoder.layers.0.encoder_attn`."""
    found = {}
    for name, tensor in state_dict.items():
        prefix, _, rest = name.rpartition(".")
        if rest == "mixing" and f"{prefix}.query_bias" in state_dict:
            weight = state_dict.get(f"{prefix}.q_proj.weight")
            if weight is not None:
                found[prefix] = AttentionShape(weight.shape[0], tensor.shape[1], f"{prefix}.pick" in state_dict)
        elif rest == "bias" and prefix.endswith(".q_proj"):
            found[prefix.removesuffix(".q_proj")] = AttentionShape(tensor.shape[0], None)
        elif rest == "in_proj_weight":
            found[prefix] = AttentionShape(tensor.shape[0] // 3, None)
    return found


def attention_type(prefix: str) -> str:
    """`encoder`, `cross` or `decoder`: the name that `--collaborative-heads` uses."""
    if prefix.endswith("encoder_attn"):
        return "cross"
    encoder = prefix.startswith("encoder.") or ".sentence_encoder." in prefix or ".encoder." in prefix
    return "encoder" if encoder else "decoder"


def check_attentions(checkpoint: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raise CollabError when the attentions of two state dicts, of a checkpoint and of a model, cannot be matched.

    Prefixes that only one of them has are left to torch's own report.
    """
    theirs, ours = attention_shapes(checkpoint), attention_shapes(model)
    common = [prefix for prefix in ours if prefix in theirs]
    kinds = [prefix for prefix in common if theirs[prefix].collaborative != ours[prefix].collaborative]
    if kinds:
        raise CollabError(_kind_sentence(kinds, theirs, ours))
    wrong = {
        field: prefixes
        for field in ("key_dim", "mix_dim", "mix_layout")
        if (prefixes := [one for one in common if getattr(theirs[one], field) != getattr(ours[one], field)])
    }
    if wrong:
        field, prefixes = next(iter(wrong.items()))
        first = prefixes[0]
        raise CollabError(
            f"{field.replace('_', ' ')} is {getattr(theirs[first], field)} in the checkpoint and "
            f"{getattr(ours[first], field)} in the model at {_where(prefixes)}: {_dim_advice(set(wrong), theirs)}"
        )


def _where(prefixes: list[str]) -> str:
    more = len(prefixes) - 1
    return prefixes[0] + (f" and {more} more attention{'s' * (more > 1)}" if more else "")


def _kind_sentence(wrong: list[str], checkpoint: dict[str, AttentionShape], model: dict[str, AttentionShape]) -> str:
    collaborative = [prefix for prefix, shape in checkpoint.items() if shape.collaborative]
    model_is_stock = not any(shape.collaborative for shape in model.values())
    theirs = "collaborative" if checkpoint[wrong[0]].collaborative else "concatenated"
    ours = "concatenated" if theirs == "collaborative" else "collaborative"
    start = f"the checkpoint has {theirs} heads and the model {ours} heads at {_where(wrong)}: "
    if not collaborative:
        return start + (
            "convert the checkpoint with `fairseq-collab-convert --path IN.pt --output OUT.pt --key-dim R`, "
            "or build the model with --collaborative-heads none"
        )
    if model_is_stock:
        return start + (
            "convert the checkpoint with `fairseq-collab-convert --to-concatenated --path IN.pt --output OUT.pt`, "
            "or load it into one of the architectures with `collab` in their names"
        )
    types = [name for name in ("encoder", "cross", "decoder") if name in map(attention_type, collaborative)]
    return start + (
        f"repeat its --collaborative-heads {'_'.join(types)}, or give the checkpoint itself to --collab-config"
    )


def _dim_advice(wrong: set[str], shapes: dict[str, AttentionShape]) -> str:
    """The flags, of those that set the fields in `wrong`, that build a model with the attentions of `shapes`."""
    flags = [*_key_dim_flags(wrong, shapes), *_mixing_flags(wrong, shapes)]
    itself = "the checkpoint itself to --collab-config"
    return f"give {itself}" if None in flags else f"give {' '.join(flags)}, or {itself}"


def _key_dim_flags(wrong: set[str], shapes: dict[str, AttentionShape]) -> list[str | None]:
    """`[None]` where the layers of one attention differ, for which there are no flags."""
    if "key_dim" not in wrong:
        return []
    if len(dims := _distinct(shapes.values())) == 1:
        return [f"--key-dim {dims.pop()}"]
    flags: list[str | None] = []
    for name in ("encoder", "cross", "decoder"):
        dims = _distinct(shape for prefix, shape in shapes.items() if attention_type(prefix) == name)
        if len(dims) > 1:
            return [None]
        flags += [f"--{name}-key-dim {dim}" for dim in dims]
    return flags


def _mixing_flags(wrong: set[str], shapes: dict[str, AttentionShape]) -> list[str | None]:
    """`[None]` where the attentions differ, for which there are no flags."""
    shared = [shape for shape in shapes.values() if shape.collaborative]
    layouts, mix_dims = {shape.mix_layout for shape in shared}, {shape.mix_dim for shape in shared}
    if not shared:
        return []
    if "key_dim" in wrong and layouts == {"dense"}:
        return ["--mix-layout dense"] if "mix_layout" in wrong else []
    if len(layouts) > 1 or len(mix_dims) > 1:
        return [None]
    # what fits by chance may follow from the key dim that is wrong
    flags = [f"--mix-dim {mix_dims.pop()}"] if wrong & {"key_dim", "mix_dim"} else []
    sparse = layouts != {"dense"}
    return flags + ([f"--mix-layout {layouts.pop()}"] if sparse and wrong & {"key_dim", "mix_layout"} else [])


def _distinct(shapes: Iterable[AttentionShape]) -> set[int]:
    return {shape.key_dim for shape in shapes}


def sizes_sentence(report: str) -> str | None:
    """What to do about the sizes in torch's report of a state dict that does not fit, a line a reason; None without."""
    found = {name: (theirs, ours) for name, theirs, ours in _SIZES.findall(report)}
    reasons = []
    for name, shapes in found.items():
        module = name.removesuffix(".weight")
        sizes = [[int(size) for size in shape.split(",") if size.strip()] for shape in shapes]
        if len(sizes[0]) != 2 or len(sizes[1]) != 2 or sizes[0][1] != sizes[1][1]:
            continue
        theirs, ours = sizes[0][0], sizes[1][0]
        flag = _POSITION_FLAGS.get(module.removesuffix(".embed_positions"))
        if module.endswith(".embed_positions") and flag is not None:
            theirs, ours = theirs - _BEFORE_POSITIONS, ours - _BEFORE_POSITIONS
            reasons.append(
                f"the checkpoint has {theirs} positions at {module} and the model {ours}: give {flag} {theirs}"
            )
        elif module.endswith(".embed_tokens"):
            reasons.append(
                f"the vocabulary of the checkpoint has {theirs} symbols at {module} and that of the model {ours}: give "
                "data that is binarised with the checkpoint's dictionary (fairseq-preprocess --srcdict, --tgtdict)"
            )
    if found and not reasons:
        name, (theirs, ours) = next(iter(found.items()))
        more = f", and {len(found) - 1} more differ" if len(found) > 1 else ""
        reasons = [
            f"{name} is {_product(theirs)} in the checkpoint and {_product(ours)} in the model{more}: repeat the sizes "
            "of the checkpoint's model on the command line"
        ]
    return one_a_line(reasons) or None


def _product(shape: str) -> str:
    return shape.replace(", ", " x ")


def load_state_dict(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Stock lists every missing and unexpected name and every wrong size, which says nothing about what to do."""

    def load(self, state_dict, strict=True, model_cfg=None, *args, **kwargs):
        renumbers_layers = any(getattr(model_cfg, f"{side}_layers_to_keep", None) for side in ("encoder", "decoder"))
        if not renumbers_layers:
            theirs, ours = dict(state_dict), self.state_dict()
            if any(".sentence_encoder." in name for name in ours):
                upgrade_names(theirs, "roberta")
            check_attentions(theirs, ours)
        try:
            return stock(self, state_dict, strict, model_cfg, *args, **kwargs)
        except RuntimeError as error:
            # after stock, which mends some sizes
            if (sentence := sizes_sentence(str(error))) is None:
                raise
            raise CollabError(sentence) from error

    return load
