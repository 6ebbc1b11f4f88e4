"""ALBERT: the attention also adds the residual, and one attention serves all layers of a group."""

from torch import Tensor, nn

from fairseq_collab.adapters.base import AttentionParts, CollaborativeLayerAdapter
from fairseq_collab.adapters.library_attention import LibraryAttention


class AlbertCollaborativeAttention(LibraryAttention):
    """As ``AlbertAttention``: output projection, dropout, residual and normalisation belong to the attention."""

    def stand_in_for(self, original: nn.Module) -> None:
        self.output_dropout, self.LayerNorm = original.output_dropout, original.LayerNorm
        super().stand_in_for(original)

    def finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        return self.LayerNorm(hidden + self.output_dropout(self.out_proj(attended)))


class ALBERTCollaborativeAdapter(CollaborativeLayerAdapter):
    """ALBERT: a shared attention is swapped once, with what all its uses show."""

    class_names = ("AlbertAttention",)
    module_class = AlbertCollaborativeAttention

    def parts(self, module: nn.Module, parent: nn.Module) -> AttentionParts:
        return AttentionParts(
            module.query,
            module.key,
            module.value,
            module.num_attention_heads,
            output=module.dense,
            owns_output=True,
            dropout=module.attention_dropout.p,
        )
