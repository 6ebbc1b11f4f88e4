"""Which key dim each attention gets, under a budget of parameters or a bound on the error. Knows no model.

The errors of a few key dims are found by short fits; between them the square of the error is interpolated.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from fairseq_collab.decomposition import cp
from fairseq_collab.decomposition.calibration import Whitening
from fairseq_collab.decomposition.layer import ConcatenatedLayer
from fairseq_collab.errors import CollabError

POINTS = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4)  # of H*K: where the error is looked at
STEP = 1 / 32  # of H*K: what key dims are multiples of
SWEEPS = 10


@dataclass(frozen=True)
class Curve:
    """How the error of one attention falls with its key dim.

    Args:
        dims: ascending key dims, the last one H*K.
        errors: relative errors (of weights, or of scores when calibrated) at ``dims``, the last one 0.
        size: Frobenius norm that the errors are relative to, in units that compare across attentions.
    """

    dims: tuple[int, ...]
    errors: tuple[float, ...]
    size: float

    def error(self, key_dim: int) -> float:
        """The relative error at a key dim up to H*K."""
        if key_dim <= self.dims[0]:
            return self.errors[0]
        right = bisect_left(self.dims, key_dim)
        low, high = self.dims[right - 1], self.dims[right]
        share = (key_dim - low) / (high - low)
        return ((1 - share) * self.errors[right - 1] ** 2 + share * self.errors[right] ** 2) ** 0.5


def error_curve(layer: ConcatenatedLayer, whitening: Whitening | None = None) -> Curve:
    """Fits a layer at ``POINTS``; dense mixing, without the bias.

    ``size`` is the root mean square of the scores of a head in units of the softmax when calibrated; 1 otherwise, so
    that all attentions count alike.
    """
    heads = layer.heads if whitening is None else whitening.apply(layer.heads)
    full = heads.q.size(1)
    dims = sorted({max(1, round(point * full)) for point in POINTS} - {full})
    errors = []
    for dim in dims:
        found = cp.decompose(heads, dim, max_sweeps=SWEEPS)[2][-1]
        errors.append(min(found, errors[-1]) if errors else found)
    head_dim = full / layer.num_heads
    size = 1.0 if whitening is None else (heads.squared_norm().item() / layer.num_heads / head_dim) ** 0.5
    return Curve((*dims, full), (*errors, 0.0), size)


def error_curves(
    layers: Mapping[str, ConcatenatedLayer], whitenings: Mapping[str, Whitening], progress: bool = True
) -> dict[str, Curve]:
    """:func:`error_curve` of every layer."""
    bar = tqdm(layers.items(), desc="error curves", unit="attention", disable=not progress)
    return {name: error_curve(layer, whitenings.get(name)) for name, layer in bar}


def steps(curve: Curve) -> list[int]:
    """The key dims that may be chosen, ascending, H*K the last."""
    full = curve.dims[-1]
    step = max(1, round(STEP * full))
    return [*range(step, full, step), full]


def under_budget(curves: Mapping[str, Curve], costs: Mapping[str, Sequence[int]], budget: int) -> dict[str, int]:
    """The key dims with the smallest sum of squared errors whose parameters fit into ``budget``.

    From the smallest dims on, the step that removes most error a parameter is taken until none fits. Steps may be
    several dims wide, so that a curve that falls late is not passed over.

    Args:
        costs: ``(a, b)`` by name: key dim R costs ``a * R + b`` parameters. budget: parameters of all together.

    Raises:
        CollabError: even the smallest dims cost more.
    """
    choices = {name: steps(curve) for name, curve in curves.items()}
    chosen = {name: dims[0] for name, dims in choices.items()}
    spent = sum(a * chosen[name] + b for name, (a, b) in costs.items())
    if spent > budget:
        raise CollabError(
            f"the budget of {budget:,} parameters is below the {spent:,} of the smallest key dims; give more"
        )

    def squared(name: str, dim: int) -> float:
        return (curves[name].error(dim) * curves[name].size) ** 2

    while True:
        best = None
        for name, dims in choices.items():
            here = squared(name, chosen[name])
            for dim in dims:
                price = costs[name][0] * (dim - chosen[name])
                if dim <= chosen[name] or spent + price > budget:
                    continue
                rate = (here - squared(name, dim)) / price
                if best is None or rate > best[0]:
                    best = rate, name, dim, price
        if best is None:
            return chosen
        _, name, dim, price = best
        chosen[name] = dim
        spent += price


def under_error(curves: Mapping[str, Curve], bound: float) -> dict[str, int]:
    """The smallest key dim of each attention whose relative error is at most ``bound``."""
    return {name: next(dim for dim in steps(curve) if curve.error(dim) <= bound) for name, curve in curves.items()}
