"""Registrations of the architectures, and nothing else. Importing this package registers them all."""

from fairseq_collab.fairseq_modules import patches

patches.install()

from fairseq_collab.models import bart, roberta, transformer, transformer_lm  # noqa: E402

__all__ = ["bart", "roberta", "transformer", "transformer_lm"]
