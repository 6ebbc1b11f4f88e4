"""BERT, and the models of transformers whose attention is BERT's: RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA and others.

The output projection lies next to the attention, in a module that also adds the residual.
"""

from torch import nn

from fairseq_collab.adapters.base import AttentionParts, CollaborativeLayerAdapter

_FAMILIES = (
    *("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra"),
    *("RobertaPreLayerNorm", "XLMRobertaXL", "Data2VecText", "Ernie", "BertGeneration"),
)


class BERTCollaborativeAdapter(CollaborativeLayerAdapter):
    """BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA: encoders and decoders, self- and cross-attention."""

    class_names = tuple(f"{family}{kind}Attention" for family in _FAMILIES for kind in ("Self", "Cross"))

    def parts(self, module: nn.Module, parent: nn.Module) -> AttentionParts:
        return AttentionParts(
            module.query,
            module.key,
            module.value,
            module.num_attention_heads,
            output=parent.output.dense,
            dropout=module.dropout.p,
        )
