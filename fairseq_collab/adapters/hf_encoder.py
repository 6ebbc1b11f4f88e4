"""Where fairseq's checkpoints of ``bert_collab`` and its like keep the model of transformers. Names only."""

from argparse import Namespace

MODEL_PREFIX = "encoder.model."
IDS_KEY = "encoder.hf_ids"
HEADS_PREFIX = "classification_heads."


def is_hf_encoder(options: Namespace) -> bool:
    """Whether options are those of an encoder of transformers."""
    return bool(getattr(options, "hf_config", None))
