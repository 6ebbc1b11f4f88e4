"""The collaborative attention layer as a batch-first ``nn.Module``, and how its mixing matrix starts.

Knows nothing of fairseq: the (T, B, D) interface with incremental state is ``fairseq_modules``.

Notation: B batch, T target length, S source length, D width, H heads, K = D / H, V = D / H value dims a head,
R shared key dims (``key_dim``), P shared dims that one head mixes (``mix_dim``).
"""

import math
from enum import Enum
from typing import Optional, Tuple, Union

import torch
from torch import Tensor, nn

from fairseq_collab import functional, projections
from fairseq_collab.config import AttentionConfig, AttentionShape, check_attention, resolve_attention
from fairseq_collab.errors import CollabError


class MixingMatrixInit(Enum):
    """How ``mixing`` starts. The first three are the original package's, by name and value.

    CONCATENATE: 1 on a head's own ``ceil(R / H)`` dims and 0 elsewhere, which is R dims concatenated.
    ALL_ONES: 1 everywhere.
    UNIFORM: normal with standard deviation 0.2 (the name is the original's; it was never uniform).
    NOISY: 1 with normal noise of 0.5, so that heads differ from the first step.
    DEFAULT: ALL_ONES for sparse mixing, whose heads differ by what they read, and NOISY for dense mixing. The
    comparison is in docs/training.md.
    """

    CONCATENATE = 1
    ALL_ONES = 2
    UNIFORM = 3
    DEFAULT = 4
    NOISY = 5

    @classmethod
    def of(cls, init: Union["MixingMatrixInit", str]) -> "MixingMatrixInit":
        """The member of that name in any case."""
        return init if isinstance(init, cls) else cls[init.upper()]


def balanced_pick(num_heads: int, mix_dim: int, key_dim: int, seed: int = 0) -> Tensor:
    """Picks from scratch: ``mix_dim`` different dims for each head, sorted, every dim serving about as many heads.

    Returns:
        (H, P) indices in which each of the R dims occurs ``floor(H*P/R)`` or ``ceil(H*P/R)`` times.
    """
    generator = torch.Generator().manual_seed(seed)
    uses = torch.zeros(key_dim)
    picks = []
    for _ in range(num_heads):
        # the least used dims first, ties in random order
        order = uses + torch.rand(key_dim, generator=generator) * 0.5
        chosen = order.argsort()[:mix_dim]
        uses[chosen] += 1
        picks.append(chosen.sort().values)
    return torch.stack(picks)


def window_pick(num_heads: int, mix_dim: int, key_dim: int) -> Tensor:
    """The dims of windows as indices: ``pick[h] = (h*s + 0..P-1) mod R`` with ``s = R // H``, (H, P)."""
    starts = torch.arange(num_heads).unsqueeze(1) * (key_dim // num_heads)
    return (starts + torch.arange(mix_dim)) % key_dim


def initial_mixing(init: MixingMatrixInit, pick: Tensor, key_dim: int) -> Tensor:
    """Starting values for ``mixing``: (H, P), for the dims given by ``pick`` (H, P)."""
    heads, mix_dim = pick.shape
    if init is MixingMatrixInit.CONCATENATE:
        owner = pick // math.ceil(key_dim / heads)  # (H, P)
        return (owner == torch.arange(heads, device=pick.device).unsqueeze(1)).float()
    if init is MixingMatrixInit.DEFAULT:
        init = MixingMatrixInit.ALL_ONES if mix_dim < key_dim else MixingMatrixInit.NOISY
    if init is MixingMatrixInit.ALL_ONES:
        return torch.ones(heads, mix_dim, device=pick.device)
    noise = torch.randn(heads, mix_dim, device=pick.device)
    return 0.2 * noise if init is MixingMatrixInit.UNIFORM else 1.0 + 0.5 * noise


class CollaborativeAttention(nn.Module):
    """Multi-head attention whose heads share one query and one key projection (arXiv 2006.16362).

    ``scores[h] = ((x Wq)[pick[h]] * mixing[h] + query_bias[h]) . (y Wk)[pick[h]] * scale``

    With ``collaborative=False`` the same module holds ordinary concatenated heads of total width ``key_dim``, the
    baseline with small keys.

    Args:
        embed_dim: D, the width of queries and of the output.
        num_heads: H.
        key_dim: R, the shared dims; a quarter of D when None (D for concatenated heads).
        kdim, vdim: widths of what keys and values are made from; D when None.
        mix_dim: P. mix_layout: ``dense``, ``window`` or ``picked``. What is not given is filled as by
            :func:`fairseq_collab.config.resolve_attention`.
        mixing_init: how the mixing matrix starts.
        dropout: probability of dropping a weight in training.
        bias: whether values and output (and concatenated queries and keys) have one.
        scale: factor on the scores; ``1 / sqrt(D / H)`` when None.
        seed: of the picked layout; a module loaded from a state dict takes the saved picks.

    Raises:
        CollabError: dims that do not fit together.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        key_dim: Optional[int] = None,
        *,
        kdim: Optional[int] = None,
        vdim: Optional[int] = None,
        mix_dim: Optional[int] = None,
        mix_layout: Optional[str] = None,
        mixing_init: Union[MixingMatrixInit, str] = MixingMatrixInit.DEFAULT,
        dropout: float = 0.0,
        bias: bool = True,
        scale: Optional[float] = None,
        collaborative: bool = True,
        seed: int = 0,
    ):
        super().__init__()
        if embed_dim % num_heads:
            raise CollabError(f"The width {embed_dim} does not divide among {num_heads} heads; change one of them.")
        shape = AttentionShape(embed_dim, num_heads, 1)
        self.mixing_init = MixingMatrixInit.of(mixing_init).name.lower()
        config = resolve_attention(
            shape,
            collaborative=collaborative,
            key_dim=key_dim,
            mix_dim=mix_dim,
            mix_layout=mix_layout,
            mixing_init=self.mixing_init,
            scale=scale,
        )
        check_attention(config, shape, "given")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.key_dim: int = config.key_dim
        self.mix_dim: int = config.mix_dim if config.mix_dim is not None else config.key_dim // num_heads
        self.mix_layout: str = config.mix_layout or "concatenated"
        self.collaborative = collaborative
        self.scale: float = functional.default_scale(embed_dim, num_heads) if scale is None else float(scale)
        self.dropout = dropout

        own_bias = bias and not collaborative
        self.q_proj = nn.Linear(embed_dim, self.key_dim, bias=own_bias)
        self.k_proj = nn.Linear(self.kdim, self.key_dim, bias=own_bias)
        self.v_proj = nn.Linear(self.vdim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.mixing: Optional[nn.Parameter] = None
        self.query_bias: Optional[nn.Parameter] = None
        if collaborative:
            self.mixing = nn.Parameter(torch.empty(num_heads, self.mix_dim))
            self.query_bias = nn.Parameter(torch.empty(num_heads, self.mix_dim))
        if self.mix_layout == "picked":
            pick = balanced_pick(num_heads, self.mix_dim, self.key_dim, seed)
        else:
            pick = window_pick(num_heads, self.mix_dim, self.key_dim)
        if self.mix_layout == "dense":
            pick = torch.arange(self.key_dim).expand(num_heads, self.key_dim).contiguous()
        self.register_buffer("pick", pick, persistent=self.mix_layout == "picked")
        self.reset_parameters()

    @classmethod
    def from_config(cls, config: AttentionConfig, embed_dim: int, num_heads: int, **kwargs):
        """The module that ``config`` describes; ``kwargs`` are those of the constructor that it leaves open."""
        return cls(
            embed_dim,
            num_heads,
            config.key_dim,
            mix_dim=config.mix_dim,
            mix_layout=config.mix_layout,
            mixing_init=config.mixing_init,
            scale=config.scale,
            collaborative=config.collaborative,
            **kwargs,
        )

    def reset_parameters(self) -> None:
        """Xavier-uniform projections, scaled down where queries, keys and values have one width, as in fairseq."""
        same_width = self.kdim == self.embed_dim and self.vdim == self.embed_dim
        gain = 1 / math.sqrt(2) if same_width else 1.0
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(projection.weight, gain=gain)
            if projection.bias is not None:
                nn.init.uniform_(projection.bias, -1 / math.sqrt(self.embed_dim), 1 / math.sqrt(self.embed_dim))
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)
        if self.collaborative:
            with torch.no_grad():
                self.mixing.copy_(initial_mixing(MixingMatrixInit.of(self.mixing_init), self.pick, self.key_dim))
                self.query_bias.zero_()

    @torch.no_grad()
    def to_concatenated(self) -> dict[str, Tensor]:
        """The projections of ordinary attention heads that compute exactly the same scores.

        A head that mixes P <= K dims is an ordinary head whose query rows are ``Wq[pick[h]] * mixing[h]`` and whose
        key rows are ``Wk[pick[h]]``, padded with zeros to K; ordinary attention scales by ``1 / sqrt(K)``.

        Returns:
            ``q_proj.weight`` (H*K, D), ``q_proj.bias``, ``k_proj.weight`` (H*K, kdim) and ``k_proj.bias``, in float32
            or wider.

        Raises:
            CollabError: a head mixes more than K dims, so that no ordinary head of the stock width equals it.
        """
        if self.mixing is None or self.query_bias is None:
            raise CollabError("These heads are concatenated already.")
        if self.mix_dim > self.head_dim:
            raise CollabError(
                f"Heads that mix {self.mix_dim} shared dims do not fit ordinary heads of {self.head_dim} dims; only "
                f"mix dims up to {self.head_dim} can be exported exactly."
            )
        wide = torch.promote_types(self.q_proj.weight.dtype, torch.float32)
        scale = self.scale / functional.default_scale(self.embed_dim, self.num_heads)
        q_weight = self.q_proj.weight.to(wide)[self.pick] * self.mixing.to(wide).unsqueeze(-1) * scale  # (H, P, D)
        q_bias = self.query_bias.to(wide) * scale  # (H, P)
        k_weight = self.k_proj.weight.to(wide)[self.pick]  # (H, P, kdim)
        missing = self.head_dim - self.mix_dim
        return {
            "q_proj.weight": nn.functional.pad(q_weight, (0, 0, 0, missing)).flatten(0, 1),
            "q_proj.bias": nn.functional.pad(q_bias, (0, missing)).flatten(),
            "k_proj.weight": nn.functional.pad(k_weight, (0, 0, 0, missing)).flatten(0, 1),
            "k_proj.bias": torch.zeros(self.embed_dim, dtype=wide, device=q_weight.device),
        }

    def extra_repr(self) -> str:
        text = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, key_dim={self.key_dim}"
        return f"{text}, mix_dim={self.mix_dim}, mix_layout={self.mix_layout}, scale={self.scale:.6g}"

    def _active_dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def _heads(self, x: Tensor) -> Tensor:
        """The dims each head reads: (B, T, R) -> (B, H, T, P)."""
        if self.mix_layout == "picked":
            return functional.picked_heads(x, self.pick)
        return functional.window_heads(x, self.num_heads, self.mix_dim)

    def _keys_used(self, few_queries: bool, multiplies: bool) -> str:
        """How :meth:`_query_and_key` brings the keys before the heads, in the words of ``backend_used``."""
        if self.mixing is None or self.mix_layout == "dense":
            return self.mix_layout
        if few_queries:
            return "spread"
        if self.mix_layout == "window":
            return "windows"
        return "one_hot" if multiplies else "gather"

    def _query_and_key(self, q: Tensor, k: Tensor, few_queries: bool) -> Tuple[Tensor, Tensor]:
        """Mixed queries (B, H, T, .) and the keys they meet, (B, H, S, .) or (B, 1, S, R).

        Args:
            q: (B, T, R) projected queries. k: (B, S, R) projected keys.
            few_queries: the keys far outnumber the queries, as in decoding one token: leave the keys as they are
                and spread the mixed queries over all R dims instead.
        """
        mixing, query_bias = self.mixing, self.query_bias
        multiplies = functional.multiplies(k)
        if not torch.jit.is_scripting():
            functional.note_keys(self._keys_used(few_queries, multiplies))
        if mixing is None or query_bias is None:
            return self._heads(q) * self.scale, self._heads(k)
        if self.mix_layout == "dense" or few_queries:
            if self.mix_layout != "dense":
                mixing = functional.spread_to_shared(mixing, self.pick, self.key_dim)
                query_bias = functional.spread_to_shared(query_bias, self.pick, self.key_dim)
            return functional.mix_query(q.unsqueeze(1), mixing, query_bias, self.scale), k.unsqueeze(1)
        if multiplies:
            query = functional.multiplied_heads(q, self.pick, mixing * self.scale, query_bias * self.scale)
            if self.mix_layout == "window":
                return query, self._heads(k)
            return query, functional.multiplied_heads(k, self.pick, torch.ones_like(mixing), None)
        return functional.mix_query(self._heads(q), mixing, query_bias, self.scale), self._heads(k)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Optional[Tensor],
        attn_mask: Optional[Tensor],
        need_weights: bool,
        few_queries: bool,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """(B, T, R), (B, S, R) and (B, H, S, V) -> (B, T, D) before the output projection, and (B, H, T, S)."""
        mask, hidden_rows = functional.merge_masks(attn_mask, key_padding_mask, self.num_heads, q.dtype)
        weights: Optional[Tensor] = None
        mixing, query_bias, dropout = self.mixing, self.query_bias, self._active_dropout()
        in_blocks, fused = False, False
        if not torch.jit.is_scripting():
            whole = self.mix_layout == "dense" and self.num_heads > 1 and not few_queries and not need_weights
            fused = whole and functional.takes_fused(q, k, v, dropout)
            in_blocks = whole and not fused and functional.takes_blocks(q, v, mask)
        if in_blocks and mixing is not None and query_bias is not None:
            mixing, query_bias = mixing * self.scale, query_bias * self.scale
            out = functional.attend_in_blocks(q, k, v, mixing, query_bias, mask, hidden_rows, dropout)
        else:
            query, key = self._query_and_key(q, k, few_queries)
            if need_weights:
                out, weights = functional.attend_with_weights(query, key, v, mask, hidden_rows, dropout)
            else:
                out = functional.attend(query, key, v, mask, hidden_rows, dropout, fused)
        out = out.transpose(1, 2).reshape(q.size(0), q.size(1), self.embed_dim)  # (B, H, T, V) -> (B, T, D)
        return out, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Projected queries, keys (R dims) and values (D dims), in the layout of what they are made from."""
        if torch.jit.is_scripting():
            return self.q_proj(query), self.k_proj(key), self.v_proj(value)
        else:
            return projections.project(query, key, value, self.q_proj, self.k_proj, self.v_proj)

    def forward(
        self,
        query: Tensor,
        key: Optional[Tensor] = None,
        value: Optional[Tensor] = None,
        key_padding_mask: Optional[Tensor] = None,
        attn_mask: Optional[Tensor] = None,
        need_weights: bool = False,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """Attends from ``query`` to ``key``.

        Args:
            query: (B, T, D).
            key: (B, S, kdim); the query when None. value: (B, S, vdim); the key when None.
            key_padding_mask: (B, S), non-zero where a key is padding.
            attn_mask: (T, S), (B*H, T, S) or what broadcasts to (B, H, T, S), added to the scores; boolean masks are
                True where masked.
            need_weights: also return the weights of each head, before dropout.

        Returns:
            the output (B, T, D), and the weights (B, H, T, S) or None. A query that may look at no key gets the
            output bias and weights of 0.
        """
        if key is None:
            key = query
        if value is None:
            value = key
        q, k, v = self._project(query, key, value)
        v = v.view(v.size(0), v.size(1), self.num_heads, self.head_dim).transpose(1, 2)  # (B, S, D) -> (B, H, S, V)
        out, weights = self._attend(q, k, v, key_padding_mask, attn_mask, need_weights, False)
        return self.out_proj(out), weights
