"""DistilBERT: the attention holds its own output projection."""

from torch import nn

from fairseq_collab.adapters.base import AttentionParts, CollaborativeLayerAdapter


class DistilBERTCollaborativeAdapter(CollaborativeLayerAdapter):
    """DistilBERT of transformers 4 (``MultiHeadSelfAttention``) and 5."""

    class_names = ("DistilBertSelfAttention", "MultiHeadSelfAttention")

    def _is_one(self, module: nn.Module) -> bool:
        # MultiHeadSelfAttention is a name that other libraries have, too
        ours = any("distilbert" in one.__module__ for one in type(module).__mro__)
        return ours and super()._is_one(module)

    def parts(self, module: nn.Module, parent: nn.Module) -> AttentionParts:
        return AttentionParts(
            module.q_lin,
            module.k_lin,
            module.v_lin,
            module.n_heads,
            output=module.out_lin,
            owns_output=True,
            dropout=module.dropout.p,
        )
