"""The command-line flags of collaborative attention, and how a model's options become its configuration.

Shared by every architecture; the checks themselves are in ``fairseq_collab.flags``.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from fairseq_collab.config import ATTENTIONS, INITS, LAYOUTS, AttentionShape
from fairseq_collab.errors import CollabError
from fairseq_collab.flags import resolve_flags

FLAGS = (
    "collaborative_heads",
    "key_dim",
    *(f"{name}_key_dim" for name in ATTENTIONS),
    "mix_dim",
    "mix_layout",
    "mixing_init",
    "collab_config",
)


def add_flags(parser: Any) -> None:
    """Adds the flags to a model's argument group. None of them has a default: what is not given stays unset."""
    parser.add_argument(
        "--collaborative-heads",
        metavar="NAMES",
        help="attentions with collaborative heads: any of encoder, cross, decoder joined by '_' or ',', or none "
        "(default: all)",
    )
    parser.add_argument(
        "--key-dim",
        type=int,
        metavar="N",
        help="total width of queries and keys: the shared dim of collaborative heads, heads x head dim of "
        "concatenated ones (default: a quarter of the model width for collaborative heads, all of it for others)",
    )
    for name in ATTENTIONS:
        parser.add_argument(f"--{name}-key-dim", type=int, metavar="N", help=f"--key-dim of the {name} attention alone")
    parser.add_argument(
        "--mix-dim",
        type=int,
        metavar="P",
        help="shared dims that one head mixes (default: all of them; the head dim with --mix-layout window or picked)",
    )
    parser.add_argument(
        "--mix-layout",
        choices=LAYOUTS,
        help="which shared dims a head mixes: all (dense, as in the paper), overlapping windows, or balanced picks",
    )
    parser.add_argument("--mixing-init", choices=INITS, help="how the mixing matrix starts")
    parser.add_argument(
        "--collab-config",
        metavar="FILE",
        help="JSON file, or checkpoint that carries its configuration, that sets all of this for every layer",
    )


class WithFlags:
    """What every registered model has before its stock class: our flags after the stock ones, and no downloads."""

    @classmethod
    def hub_models(cls) -> dict:
        return {}

    @classmethod
    def add_args(cls, parser: Any) -> None:
        super().add_args(parser)
        add_flags(parser)


def flatten_options(args: Any) -> None:
    """Turns nested options (``encoder.layers``, as a Hydra user may write them) into flat ones, in place."""
    if not isinstance(args, DictConfig):
        return
    for group in ("encoder", "decoder", "quant_noise"):
        nested = args.get(group)
        if isinstance(nested, DictConfig):
            for key, value in nested.items():
                args[f"{group}_{key}"] = value
            del args[group]


def fill_flags(args: Any) -> None:
    """Sets every flag that ``args`` lacks to None, so that old checkpoints and Hydra meet the same attributes."""
    for flag in FLAGS:
        if not hasattr(args, flag) or getattr(args, flag) is None:
            setattr(args, flag, None)


def preset(stock: Callable[[Any], Any]) -> Callable[[Any], None]:
    """The architecture function of a collaborative model from the stock one of the same size."""

    def fill(args: Any) -> None:
        flatten_options(args)
        options = _plain(args)
        stock(options)
        fill_flags(options)
        _store(options, args)

    fill.__name__ = f"{stock.__name__}_collab"
    return fill


def kept_layers(args: Any, side: str, layers: int) -> list[int] | None:
    """The layers that ``--{side}-layers-to-keep`` names, in the order in which fairseq keeps them, or None.

    Raises:
        CollabError: something else than numbers of some of the ``layers`` layers.
    """
    text = getattr(args, f"{side}_layers_to_keep", None)
    if not text:
        return None
    parts = [part.strip() for part in str(text).split(",")]
    if not all(part.isdecimal() and int(part) < layers for part in parts):
        raise CollabError(
            f"--{side}-layers-to-keep is {text!r}; it takes numbers from 0 to {layers - 1}, the layers of this model, "
            "joined by ','."
        )
    return sorted(int(part) for part in parts)


def build_with_config(
    args: Any,
    architecture: Callable[[Any], Any],
    find_shapes: Callable[[Namespace], Mapping[str, AttentionShape]],
    build: Callable[[Namespace], Any],
) -> Any:
    """Resolves the flags, builds the model with ``args.collab`` set, and stores the configuration in the options.

    Afterwards ``args.collab_config`` is the whole configuration as JSON, which is what a checkpoint then carries.

    Args:
        args: options as fairseq hands them to ``build_model``: a Namespace, or a DictConfig under Hydra.
        architecture: fills every option that is missing, as old checkpoints need.
        find_shapes: the attentions of the model that the options describe.
        build: makes the model from a Namespace with a ``collab`` attribute.

    Raises:
        CollabError: see :func:`fairseq_collab.flags.resolve_flags`.
    """
    options = _plain(args)
    architecture(options)
    for name in ("encoder_layers_to_keep", "decoder_layers_to_keep"):
        # the command line makes a list of it, which stock fairseq then takes for a string
        if isinstance(getattr(options, name, None), (list, tuple)):
            setattr(options, name, ",".join(map(str, getattr(options, name))))
    shapes = dict(find_shapes(options))
    config = resolve_flags(options, shapes)
    for name, shape in shapes.items():
        kept = kept_layers(options, "encoder" if name == "encoder" else "decoder", shape.layers)
        if kept is not None:
            config = config.keep_layers(name, kept)
    options.collab = config
    model = build(options)
    del options.collab
    options.collab_config = config.to_json()
    _store(options, args)
    return model


def _plain(args: Any) -> Namespace:
    """A copy as a Namespace: what omegaconf before 2.1 lacks is None, for which fairseq fills no default."""
    return Namespace(**(OmegaConf.to_container(args) if isinstance(args, DictConfig) else vars(args)))


def _store(options: Namespace, args: Any) -> None:
    """Puts options that :func:`_plain` copied back."""
    with open_dict(args) if isinstance(args, DictConfig) else nullcontext():
        for key, value in vars(options).items():
            if not hasattr(args, key) or getattr(args, key) is not value:
                setattr(args, key, value)
