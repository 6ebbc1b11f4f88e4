"""What `torch.load` must be told to accept in a fairseq checkpoint. Loads nothing itself.

Since torch 2.6 `torch.load` refuses every class that it was not told about. fairseq's checkpoints hold an
`argparse.Namespace`, and numpy arrays and numbers where a metric was kept with numpy (`--eval-bleu` does). None of
these can run code when it is loaded; arrays of Python objects stay refused.
"""

import argparse

import numpy
import torch

_PLAIN_DTYPES = "?bhilqBHILQefdFD"


def allow_fairseq_checkpoints() -> None:
    """Register what stock fairseq saves as safe to load; does nothing on a torch that has no such list (before 2.4)."""
    add_safe_globals = getattr(torch.serialization, "add_safe_globals", None)
    if add_safe_globals is None:
        return
    add_safe_globals([argparse.Namespace, numpy.ndarray, numpy.dtype])
    add_safe_globals(list({type(numpy.dtype(code)) for code in _PLAIN_DTYPES}))
    multiarray = numpy.core.multiarray if numpy.__version__.startswith("1.") else numpy._core.multiarray
    functions = [multiarray._reconstruct, multiarray.scalar]
    add_safe_globals(functions)
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 6):
        # numpy 1 and numpy 2 write different module names; either must load on either
        add_safe_globals(
            [(f, f"numpy.{core}.multiarray.{f.__name__}") for f in functions for core in ("core", "_core")]
        )
