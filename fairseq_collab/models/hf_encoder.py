"""Registers ``bert_collab``, ``distilbert_collab`` and ``albert_collab``: encoders of transformers."""

from typing import Any

from fairseq.models import register_model, register_model_architecture

from fairseq_collab.fairseq_modules.hf_encoder import HFEncoderModel
from fairseq_collab.fairseq_modules.hf_start import add_options, build, fill_options


class _Registered(HFEncoderModel):
    """What the three share: flags, and a model that is built for one ``model_type`` of transformers."""

    model_type = ""

    @classmethod
    def hub_models(cls) -> dict:
        return {}

    @classmethod
    def add_args(cls, parser: Any) -> None:
        add_options(parser)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> HFEncoderModel:
        """See :func:`fairseq_collab.fairseq_modules.hf_start.build`."""
        return build(args, task, cls.model_type)


# no dataclass: fairseq then hands build_model a copy of the options, and the checkpoint would lack what is set there
for kind in ("bert", "distilbert", "albert"):
    name = f"{kind}_collab"
    register_model(name)(type(f"{kind.title()}Collab", (_Registered,), {"model_type": kind, "__doc__": f"A {kind}."}))
    register_model_architecture(name, name)(fill_options)
