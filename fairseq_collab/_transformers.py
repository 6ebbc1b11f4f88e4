"""transformers, imported where it can be: what its absence or a broken torchaudio would make of it; its tokenizers."""

import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Union

from fairseq_collab.errors import CollabError

logger = logging.getLogger(__name__)

VOCABULARY_FILES = (
    *("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt"),
    *("spiece.model", "spm.model", "tokenizer.model", "sentencepiece.bpe.model"),
)


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


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without progress bars and without lists of weights that are about to be looked at anyway."""
    log = import_transformers().utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def load_tokenizer(folder: Union[str, Path], flag: str = "--hf-model") -> Any:
    """The tokenizer of a folder; nothing is fetched, and no code in it runs.

    Args:
        flag: the option that named it.

    Raises:
        CollabError: it has none that transformers can load.
    """
    if not any((Path(folder) / name).is_file() for name in VOCABULARY_FILES):
        # transformers would make a tokenizer without words
        raise CollabError(f"{flag} {folder} has no tokenizer; it needs one of {', '.join(VOCABULARY_FILES)}")
    try:
        with quiet():
            return import_transformers().AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # of any kind: the readers of the files have their own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise CollabError(f"{flag} {folder} has no tokenizer that transformers can load ({reason})") from error
