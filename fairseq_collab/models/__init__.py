"""Registrations of the architectures, and nothing else. Importing this package registers them all."""

from fairseq_collab.fairseq_modules import patches

patches.install()

from fairseq_collab.models import bart, hf_encoder, roberta, transformer, transformer_lm  # noqa: E402

__all__ = ["bart", "hf_encoder", "roberta", "transformer", "transformer_lm"]
