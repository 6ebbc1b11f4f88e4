"""Registrations of the architectures, and nothing else. Importing this package registers them all."""

from fairseq_collab.fairseq_modules import patches

patches.install()

from fairseq_collab.models import hf_encoder, transformer, transformer_lm  # noqa: E402

__all__ = ["hf_encoder", "transformer", "transformer_lm"]
