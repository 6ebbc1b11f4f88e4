"""BERT, DistilBERT and ALBERT of Hugging Face's transformers as a model of fairseq, with or without shared keys.

The forward pass and the heads; how a training or a checkpoint begins is ``hf_start``, reading folders ``hf_folder``.

Notation: B batch, T length, D width, V symbols of fairseq's dictionary.
"""

import logging
from argparse import Namespace
from typing import Any, Optional

from fairseq.models import FairseqEncoder, FairseqEncoderModel
from fairseq.models.roberta import RobertaModel
from torch import Tensor, nn

from fairseq_collab.fairseq_modules.hf_folder import FAMILIES, load_head

logger = logging.getLogger(__name__)


class HFEncoder(FairseqEncoder):
    """A model for masked language modelling that reads and predicts the ids of fairseq's dictionary.

    Args:
        dictionary: fairseq's. model: of transformers.
        hf_ids: the id of each symbol in the model's own vocabulary, (V,).
    """

    def __init__(self, dictionary: Any, model: nn.Module, hf_ids: Tensor):
        super().__init__(dictionary)
        self.model = model
        self.family = FAMILIES[model.config.model_type]
        self.register_buffer("hf_ids", hf_ids)

    def inputs(self, src_tokens: Tensor) -> dict[str, Tensor]:
        """What the model of transformers takes for ``src_tokens`` (B, T): ids, mask and, if it has them, segments.

        Padding is what lies before the first or after the last token: a pad token between others is text. Segment 0
        goes up to the first separator, the others are 1, padding 0, as its tokenizers count.
        """
        token = src_tokens.ne(self.dictionary.pad())
        visible = token.cumsum(1).gt(0) & token.flip(1).cumsum(1).flip(1).gt(0)
        found = {"input_ids": self.hf_ids[src_tokens], "attention_mask": visible.long()}
        if self.family.segments:
            ends = src_tokens.eq(self.dictionary.eos()).long()
            before = ends.cumsum(1) - ends  # separators before each token
            found["token_type_ids"] = (before.gt(0) & visible).long()
        return found

    def forward(
        self,
        src_tokens: Tensor,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        masked_tokens: Optional[Tensor] = None,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Features, or the logits of a masked language model.

        Args:
            src_tokens: (B, T). masked_tokens: (B, T), True where logits are wanted; everywhere when None.

        Returns:
            (B, T, D) if ``features_only``, else (B, T, V) or (masked tokens, V); and ``inner_states``, each (T, B, D),
            or None.
        """
        found = self.model.base_model(**self.inputs(src_tokens), output_hidden_states=return_all_hiddens)
        x = found.last_hidden_state  # (B, T, D)
        states = [state.transpose(0, 1) for state in found.hidden_states] if return_all_hiddens else None
        if not features_only:
            x = self.output_layer(x, masked_tokens)
        return x, {"inner_states": states}

    def output_layer(self, features: Tensor, masked_tokens: Optional[Tensor] = None) -> Tensor:
        """Logits in the order of fairseq's dictionary: (B, T, D) -> (B, T, V), or (masked tokens, V)."""
        if masked_tokens is not None:
            features = features[masked_tokens, :]
        return self.family.predict(self.model, features).index_select(-1, self.hf_ids)

    def max_positions(self) -> int:
        return self.model.config.max_position_embeddings


class ClassificationHead(nn.Module):
    """The head of transformers' models for sequence classification, under the names of fairseq's RoBERTa.

    ``out_proj(dropout(activation(dense(features of [CLS]))))``; ``dense`` is what BERT and ALBERT call their pooler
    and DistilBERT its pre-classifier.

    Args:
        config: of the model. inner_dim: outputs of ``dense``. dropout: its probability.
    """

    def __init__(self, config: Any, num_classes: int, inner_dim: int, dropout: float):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, inner_dim)
        self.activation = FAMILIES[config.model_type].activation
        self.dropout = nn.Dropout(dropout)
        self.out_proj = nn.Linear(inner_dim, num_classes)
        for layer in (self.dense, self.out_proj):
            nn.init.normal_(layer.weight, std=config.initializer_range)
            nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor, **unused: Any) -> Tensor:
        """(B, T, D) -> (B, classes)."""
        return self.out_proj(self.dropout(self.activation(self.dense(features[:, 0]))))


class HFEncoderModel(RobertaModel):
    """What fairseq's tasks and criterions know of RoBERTa, around an encoder of transformers.

    ``forward``, the hub interface and what happens to heads when a checkpoint is loaded are RoBERTa's.

    Args:
        args: the options. encoder: the encoder.
        folder: where the heads of a new training come from; None when a checkpoint will bring them.
    """

    def __init__(self, args: Namespace, encoder: HFEncoder, folder: Optional[str] = None):
        # RoBERTa's own constructor draws all weights anew
        FairseqEncoderModel.__init__(self, encoder)
        self.args = args
        self.folder = folder
        self.classification_heads = nn.ModuleDict()

    @property
    def config(self) -> Any:
        """The configuration of the encoder."""
        return self.encoder.model.config

    def register_classification_head(
        self, name: str, num_classes: int = 2, inner_dim: Optional[int] = None, **unused: Any
    ) -> None:
        """Adds a head; it starts as the one that the folder has for as many classes, as far as it has one."""
        inner_dim = inner_dim or self.config.hidden_size
        if name in self.classification_heads:
            old = self.classification_heads[name]
            if (num_classes, inner_dim) != (old.out_proj.out_features, old.dense.out_features):
                logger.warning(
                    "the head %s with %d classes and %d inner dims is replaced by one with %d and %d",
                    *(name, old.out_proj.out_features, old.dense.out_features, num_classes, inner_dim),
                )
        head = ClassificationHead(self.config, num_classes, inner_dim, self._head_dropout())
        if self.folder is not None and inner_dim == self.config.hidden_size:
            weights = load_head(self.folder, self.config, num_classes)
            head.load_state_dict(weights, strict=False)
            fresh = [part for part in ("dense", "out_proj") if f"{part}.weight" not in weights]
            logger.info("head %s: %s", name, f"new {' and '.join(fresh)}" if fresh else "as in the folder")
        self.classification_heads[name] = head

    def _head_dropout(self) -> float:
        """As given with ``--pooler-dropout``, or else as the configuration has it."""
        given = getattr(self.args, "pooler_dropout", None)
        if given is None:
            given = getattr(self.config, self.encoder.family.pooler_dropout)
        # BERT's may be left open
        return getattr(self.config, self.encoder.family.dropout) if given is None else given
