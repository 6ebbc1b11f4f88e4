"""Collaborative multi-head attention for stock fairseq: pass `--user-dir fairseq_collab` to any fairseq command.

Here: the version, the public names (imported on first use), what makes `torch.load` accept fairseq's checkpoints
without `weights_only=False`, and what makes every spelling of `--user-dir` work. No model code; neither fairseq nor
transformers is imported.
"""

import importlib

from ._plugin_path import PluginPath
from ._safe_load import allow_fairseq_checkpoints

__version__ = "0.1.0"

_HOME_OF = {
    "ALBERTCollaborativeAdapter": "adapters.albert",
    "AttentionParts": "adapters.base",
    "BERTCollaborativeAdapter": "adapters.bert",
    "CollabConfig": "config",
    "CollabError": "errors",
    "CollaborativeAttention": "attention",
    "CollaborativeLayerAdapter": "adapters.base",
    "DistilBERTCollaborativeAdapter": "adapters.distilbert",
    "MixingMatrixInit": "attention",
    "load_collaborative": "pretrained",
    "save_collaborative": "pretrained",
    "swap_to_collaborative": "swap",
}

__all__ = ["__version__", *_HOME_OF]

__path__ = PluginPath(__path__)

allow_fairseq_checkpoints()


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOME_OF[name] in ("swap", "pretrained"):
        # models of transformers are usually loaded between this import and the call
        importlib.import_module("._transformers", __name__).hide_unusable_torchaudio()
    value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
