"""Importing transformers where it can be imported: what its absence, or a broken torchaudio, would make of it."""

import importlib.util
import logging
import sys
from types import ModuleType

from fairseq_collab.errors import CollabError

logger = logging.getLogger(__name__)


def import_transformers() -> ModuleType:
    """The package.

    Raises:
        CollabError: it is not installed.
    """
    hide_unusable_torchaudio()
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        if error.name not in (None, "transformers"):
            raise
        raise CollabError(
            "transformers cannot be imported; install it with pip install 'fairseq_collab[hf]'"
            + ("" if error.name else f" ({str(error).splitlines()[0]})")
            + "."
        ) from error


def hide_unusable_torchaudio() -> None:
    """Keeps transformers from importing a torchaudio that was built for another torch than the one installed.

    transformers imports it with every model where it is installed, text or audio, and fails where it cannot be loaded.
    """
    if sys.modules.get("torchaudio", "") is None or importlib.util.find_spec("torchaudio") is None:
        return
    try:
        importlib.import_module("torchaudio")
    except (ImportError, OSError) as error:
        logger.info(
            "the installed torchaudio cannot be loaded (%s) and is treated as if it were not installed; models of text "
            "do not need it",
            str(error).splitlines()[0],
        )
        sys.modules["torchaudio"] = None  # what Python takes for a package that is not installed
        known = sys.modules.get("transformers.utils.import_utils")
        cached = getattr(known, "is_torchaudio_available", None)
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
