"""The reference, called with what a module holds."""

from torch import Tensor

from fairseq_collab.attention import CollaborativeAttention
from fairseq_collab.reference import reference_attention


def oracle(
    module: CollaborativeAttention, query: Tensor, key: Tensor, value: Tensor, **masks: Tensor
) -> tuple[Tensor, Tensor]:
    """Output (B, T, D) and weights (B, H, T, S) by the reference, from the parameters of a module."""
    return reference_attention(
        query,
        key,
        value,
        q_weight=module.q_proj.weight,
        k_weight=module.k_proj.weight,
        v_weight=module.v_proj.weight,
        out_weight=module.out_proj.weight,
        v_bias=module.v_proj.bias,
        out_bias=module.out_proj.bias,
        mixing=module.mixing,
        query_bias=module.query_bias,
        pick=module.pick,
        scale=module.scale,
        **masks,
    )
