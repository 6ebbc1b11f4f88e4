"""What each attention of a model looks like: key dims, mixing, scale, per layer; JSON in and out.

Options become such a configuration in ``flags``. Nothing here builds a module or imports fairseq.

Letters as everywhere: H heads, D model width, K = D / H, R = ``key_dim``, P = ``mix_dim``.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Iterable, Mapping, Optional

from fairseq_collab.errors import CollabError

ATTENTIONS = ("encoder", "cross", "decoder")
LAYOUTS = ("dense", "window", "picked")
INITS = ("default", "concatenate", "all_ones", "uniform", "noisy")
JSON_VERSION = 1


@dataclass(frozen=True)
class AttentionShape:
    """The part of a model that its attention must fit: ``embed_dim`` D, ``num_heads`` H and the number of layers."""

    embed_dim: int
    num_heads: int
    layers: int


@dataclass(frozen=True)
class AttentionConfig:
    """One attention of one layer.

    Args:
        collaborative: shared keys and queries with mixing; otherwise ordinary concatenated heads.
        key_dim: R, the shared dims of collaborative heads, or the total H*K of concatenated ones.
        mix_dim: P, shared dims that one head mixes; None for concatenated heads.
        mix_layout: ``dense`` (P = R), ``window`` or ``picked``; None for concatenated heads.
        mixing_init: starting values of the mixing matrix, a name of :class:`MixingMatrixInit` in lower case.
        scale: factor on the scores; None is ``1 / sqrt(D / H)``.
    """

    collaborative: bool
    key_dim: int
    mix_dim: Optional[int] = None
    mix_layout: Optional[str] = None
    mixing_init: str = "default"
    scale: Optional[float] = None


@dataclass(frozen=True)
class CollabConfig:
    """Every attention of a model: one :class:`AttentionConfig` a layer for ``encoder``, ``cross`` and ``decoder``.

    Attentions that a model does not have (the encoder of a language model) are empty tuples.
    """

    encoder: tuple[AttentionConfig, ...] = ()
    cross: tuple[AttentionConfig, ...] = ()
    decoder: tuple[AttentionConfig, ...] = ()

    def to_json(self) -> str:
        """One line of JSON from which :meth:`from_json` restores an equal configuration."""
        layers = {name: [asdict(one) for one in getattr(self, name)] for name in ATTENTIONS}
        return json.dumps({"format": "fairseq_collab", "version": JSON_VERSION, **layers})

    @classmethod
    def from_json(cls, text: str, shapes: Mapping[str, AttentionShape], source: str = "--collab-config"):
        """Reads what :meth:`to_json` writes, or a shorter form written by hand.

        In the shorter form an attention is one object that holds for all its layers, and only ``key_dim`` is
        needed; attentions that are left out stay concatenated.

        Args:
            text: the JSON.
            shapes: the model's attentions, by name; the others must not be configured.
            source: what to call the text in messages.

        Raises:
            CollabError: not JSON, unknown or ill-typed entries, a wrong number of layers, or dims that do not fit.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise CollabError(f"{source} is not JSON ({error}).") from None
        if not isinstance(data, dict):
            raise CollabError(f"{source} must be a JSON object with the attentions {', '.join(ATTENTIONS)}.")
        if data.get("version", JSON_VERSION) != JSON_VERSION:
            raise CollabError(f"{source} has version {data['version']}; this release reads version {JSON_VERSION}.")
        unknown = set(data) - {"format", "version", *ATTENTIONS}
        if unknown:
            raise CollabError(
                f"{source} has the unknown entry {sorted(unknown)[0]!r}; known are {', '.join(ATTENTIONS)}."
            )
        found = {}
        for name in ATTENTIONS:
            given = data.get(name)
            shape = shapes.get(name)
            if shape is None:
                if given:
                    raise CollabError(f"{source} configures the {name} attention, which this model does not have.")
                continue
            if given is None:
                given = {"collaborative": False}
            if isinstance(given, dict):
                given = [given] * shape.layers
            if not isinstance(given, list) or len(given) != shape.layers:
                count = len(given) if isinstance(given, list) else 0
                raise CollabError(
                    f"{source} has {count} layers for the {name} attention, the model has {shape.layers}: "
                    "give one object per layer, or a single object for all."
                )
            found[name] = tuple(
                check_attention(_read_attention(entry, shape, f"{source}, {name} layer {i}"), shape, name, i)
                for i, entry in enumerate(given)
            )
        return cls(**found)

    def keep_layers(self, name: str, layers: Iterable[int]) -> "CollabConfig":
        """The configuration of a model of which only ``layers`` of attention ``name`` are kept (layer pruning)."""
        kept = getattr(self, name)
        return replace(self, **{name: tuple(kept[i] for i in layers)})


def _read_attention(entry: Any, shape: AttentionShape, where: str) -> AttentionConfig:
    known = {field.name for field in fields(AttentionConfig)}
    if not isinstance(entry, dict):
        raise CollabError(f'{where} must be an object such as {{"key_dim": 64}}, not {entry!r}.')
    unknown = set(entry) - known
    if unknown:
        raise CollabError(
            f"{where} has the unknown entry {sorted(unknown)[0]!r}; known are {', '.join(sorted(known))}."
        )
    for key in ("key_dim", "mix_dim"):
        if entry.get(key) is not None and type(entry[key]) is not int:
            raise CollabError(f"{where}: {key} must be a whole number, not {entry[key]!r}.")
    collaborative = entry.get("collaborative", True)
    if not isinstance(collaborative, bool):
        raise CollabError(f"{where}: collaborative must be true or false, not {collaborative!r}.")
    return resolve_attention(
        shape,
        collaborative=collaborative,
        key_dim=entry.get("key_dim"),
        mix_dim=entry.get("mix_dim"),
        mix_layout=entry.get("mix_layout"),
        mixing_init=entry.get("mixing_init") or "default",
        scale=entry.get("scale"),
    )


def resolve_attention(
    shape: AttentionShape,
    *,
    collaborative: bool,
    key_dim: Optional[int] = None,
    mix_dim: Optional[int] = None,
    mix_layout: Optional[str] = None,
    mixing_init: str = "default",
    scale: Optional[float] = None,
) -> AttentionConfig:
    """Fills what was not given: a quarter of D for collaborative keys, dense mixing unless P says otherwise.

    Heads that mix all shared dims are ``dense``, whatever layout was asked for: the order in which a window or a
    pick would name the dims changes nothing but the order of ``mixing``. Nothing is checked here;
    :func:`check_attention` does that.
    """
    if not collaborative:
        return AttentionConfig(False, shape.embed_dim if key_dim is None else key_dim, scale=scale)
    if key_dim is None:
        key_dim = max(1, shape.embed_dim // 4)
    if mix_layout is None:
        windows_fit = mix_dim is not None and key_dim % shape.num_heads == 0 and mix_dim >= key_dim // shape.num_heads
        mix_layout = "dense" if mix_dim in (None, key_dim) else "window" if windows_fit else "picked"
    if mix_dim is None:
        mix_dim = key_dim if mix_layout == "dense" else min(shape.embed_dim // shape.num_heads, key_dim)
    if mix_dim == key_dim and mix_layout in LAYOUTS:
        mix_layout = "dense"
    return AttentionConfig(True, key_dim, mix_dim, mix_layout, mixing_init, scale)


def check_attention(config: AttentionConfig, shape: AttentionShape, name: str, layer: int = 0) -> AttentionConfig:
    """Returns ``config`` unchanged if an attention of this shape can be built from it.

    Raises:
        CollabError: naming the value, the attention and layer, and the values that would do.
    """
    heads, width, key_dim = shape.num_heads, shape.embed_dim, config.key_dim
    where = f"the {name} attention of layer {layer}"
    if key_dim < 1:
        raise CollabError(f"The key dim of {where} is {key_dim}; it must be at least 1 (--key-dim).")
    if key_dim > width:
        raise CollabError(
            f"The key dim of {where} is {key_dim}, more than the model width {width}, which is already "
            f"uncompressed; give --key-dim {width} or less."
        )
    if config.scale is not None and not (isinstance(config.scale, (int, float)) and config.scale > 0):
        raise CollabError(f"The scale of {where} is {config.scale!r}; it must be a number above 0.")
    if not config.collaborative:
        if key_dim % heads:
            raise CollabError(
                f"The key dim {key_dim} of {where} does not divide among its {heads} concatenated heads; give a "
                f"multiple of {heads}, or make this attention collaborative with --collaborative-heads."
            )
        return config
    mix_dim, layout = config.mix_dim, config.mix_layout
    if layout not in LAYOUTS:
        raise CollabError(f"The mix layout of {where} is {layout!r}; known are {', '.join(LAYOUTS)} (--mix-layout).")
    if config.mixing_init not in INITS:
        raise CollabError(f"The mixing init of {where} is {config.mixing_init!r}; known are {', '.join(INITS)}.")
    if mix_dim < 1 or mix_dim > key_dim:
        raise CollabError(
            f"The mix dim of {where} is {mix_dim}; a head can mix 1 to {key_dim} of the {key_dim} shared "
            "dims (--mix-dim)."
        )
    if layout == "dense" and mix_dim != key_dim:
        raise CollabError(
            f"Dense mixing in {where} uses all {key_dim} shared dims, not {mix_dim}; leave --mix-dim out, or give "
            "--mix-layout window or picked."
        )
    if layout == "window" and (key_dim % heads or mix_dim < key_dim // heads):
        raise CollabError(
            f"Windows in {where} need a key dim that is a multiple of its {heads} heads and a mix dim of at least "
            f"key dim / heads, not key dim {key_dim} and mix dim {mix_dim}; change them or give --mix-layout picked."
        )
    if layout == "picked" and mix_dim * heads < key_dim:
        raise CollabError(
            f"{heads} heads that pick {mix_dim} dims each leave some of the {key_dim} shared dims of {where} unused; "
            f"give --mix-dim {-(-key_dim // heads)} or more."
        )
    return config
