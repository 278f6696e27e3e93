"""An attention layer to start a model from: projections around `attention`, with grouped heads, rotary or alibi positions, and a cache.

`Attention` with as many key heads as query heads computes what `torch.nn.MultiheadAttention` computes, and loads its weights.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .attention import attention
from .packing import Padding
from .visibility import segments

if TYPE_CHECKING:
    from .cache import LayerCache
    from .policy import Names

POSITIONS = ("none", "rotary", "alibi")


class Attention(nn.Module):
    """Multi-head attention as a module: (B, S, embed_dim) in, (B, S, embed_dim) out.

    embed_dim: size of the input and of the output.
    heads, kv_heads: query heads, and key and value heads that groups of them share (default: as many).
    head_dim: default embed_dim / heads.
    key_dim, value_dim: sizes of the inputs of keys and values, for cross attention (default embed_dim).
    positions: "none", "rotary" (Su et al. 2021, arXiv:2104.09864, the two halves of a head rotated against each other, as in Llama) or
        "alibi" (Press et al. 2021, arXiv:2108.12409).
    dropout: on the attention weights, in training.
    backend, layer: as in `attention`; `use`, `using` and the environment hold when `backend` is None.

    Masks are those of `attention`: True means a real token. `nn.MultiheadAttention`'s `key_padding_mask` says the opposite:
    `key_mask=~key_padding_mask`, `mask=~attn_mask[None, None]`, or `bias=attn_mask[None, None]` if it is floating.
    """

    def __init__(
        self,
        embed_dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = True,
        positions: str = "none",
        rotary_base: float = 10000.0,
        dropout: float = 0.0,
        backend: Names | None = None,
        layer: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"kv_heads: at least 1 and a divisor of heads={heads}, got {kv_heads}")
        if head_dim is None and embed_dim % heads:
            raise ValueError(f"heads: a divisor of embed_dim={embed_dim}, got {heads}; or give head_dim")
        head_dim = embed_dim // heads if head_dim is None else head_dim
        if positions not in POSITIONS:
            raise ValueError(f"positions: one of {', '.join(POSITIONS)}, got {positions!r}")
        if positions == "rotary" and head_dim % 2:
            raise ValueError(f"head_dim: even for rotary positions, got {head_dim}")
        self.heads, self.kv_heads, self.head_dim, self.positions = heads, kv_heads, head_dim, positions
        self.rotary_base, self.dropout, self.backend, self.layer = rotary_base, dropout, backend, layer
        made = {"bias": bias, "device": device, "dtype": dtype}
        self.query_proj = nn.Linear(embed_dim, heads * head_dim, **made)
        self.key_proj = nn.Linear(embed_dim if key_dim is None else key_dim, kv_heads * head_dim, **made)
        self.value_proj = nn.Linear(embed_dim if value_dim is None else value_dim, kv_heads * head_dim, **made)
        self.out_proj = nn.Linear(heads * head_dim, embed_dim, **made)
        if positions == "alibi":
            self.register_buffer("slopes", alibi_slopes(heads, device), persistent=False)
        self.register_load_state_dict_pre_hook(_from_multihead_attention)
        self.reset_parameters()

    @classmethod
    def from_multihead_attention(cls, module: nn.MultiheadAttention, **options: Any) -> Attention:
        """The same layer with the same weights, copied. `options` are `backend` and `layer`. Inputs are (B, S, E) whatever `batch_first` was.

        Raises ValueError for what `attention` has no words for: `add_bias_kv` and `add_zero_attn`.
        """
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError(
                "module: without add_bias_kv and add_zero_attn, which add key slots of their own; append them to key and value"
            )
        weight = module.out_proj.weight
        new = cls(
            module.embed_dim, module.num_heads, key_dim=module.kdim, value_dim=module.vdim, bias=module.in_proj_bias is not None,
            dropout=module.dropout, device=weight.device, dtype=weight.dtype, **options,
        )  # fmt: skip
        new.load_state_dict(module.state_dict())
        return new.train(module.training)

    def reset_parameters(self) -> None:
        """Xavier-uniform weights of query, key and value, each projection by its own width; torch's usual ones of the output; zero biases."""
        self.out_proj.reset_parameters()
        for projection in (self.query_proj, self.key_proj, self.value_proj):
            nn.init.xavier_uniform_(projection.weight)
        for projection in (self.query_proj, self.key_proj, self.value_proj, self.out_proj):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def _apply(self, function: Any, recurse: bool = True) -> Attention:
        # Slopes are known numbers, and in no state dict: `to_empty` must not leave them as it finds them, nor another dtype round them.
        super()._apply(function, recurse)
        if self.positions == "alibi":
            self.slopes = alibi_slopes(self.heads, self.slopes.device)
        return self

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        *,
        key_mask: torch.Tensor | Padding | None = None,
        cache: LayerCache | None = None,
        position_ids: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attends from `query` (B, Sq, embed_dim) to itself, or to `key` and `value` (default: `key` again).

        position_ids: (B, Sq) for rotary positions; default what the cache says, or each slot less the padded slots before it, or the place
            within its segment. With a cache, ids already include the past.
        options: any other of `attention`: causal, window, query_mask, mask, bias, lengths, cu_seqlens, softcap, sinks, scale, return_lse ...
        """
        if value is not None and key is None:
            raise ValueError("value: goes with key, which was not given")
        if "layout" in options or (self.positions == "alibi" and "alibi_slopes" in options):
            name = "layout" if "layout" in options else "alibi_slopes"
            raise TypeError(f"{name}: the layer gives this itself")
        if position_ids is not None and self.positions != "rotary":
            raise ValueError(f"position_ids: for rotary positions, this layer has positions={self.positions!r}")
        if key is not None and self.positions == "rotary":
            raise ValueError("key: rotary positions are for self attention; build the layer of a cross attention with positions='none'")
        source = query if key is None else key
        queries = self.query_proj(query).unflatten(-1, (self.heads, self.head_dim))
        keys = self.key_proj(source).unflatten(-1, (self.kv_heads, self.head_dim))
        values = self.value_proj(source if value is None else value).unflatten(-1, (self.kv_heads, self.head_dim))
        if self.positions == "rotary":
            if position_ids is None:
                position_ids = _positions(query, key_mask, cache, options.get("cu_seqlens"))
            turn = rotation(position_ids, self.head_dim, self.rotary_base, torch.promote_types(queries.dtype, torch.float32))
            queries, keys = rotated(queries, turn), rotated(keys, turn)
        elif self.positions == "alibi":
            options["alibi_slopes"] = self.slopes
        result = attention(
            queries, keys, values, key_mask=key_mask, cache=cache, dropout_p=self.dropout if self.training else 0.0, backend=self.backend,
            layer=self.layer, **options,
        )  # fmt: skip
        if options.get("return_lse"):
            return self.out_proj(result[0].flatten(-2)), result[1]
        return self.out_proj(result.flatten(-2))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, positions={self.positions!r}"


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> torch.Tensor:
    """The slopes of Press et al. 2021 (arXiv:2108.12409), (heads,) float32: 2^(-8h/n) for n heads, a power of two.

    Between powers of two, those of the lower one, then every second of the higher one.
    """
    lower = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * h / lower) for h in range(1, lower + 1)]
    slopes += [2.0 ** (-4.0 * h / lower) for h in range(1, 2 * lower + 1, 2)][: heads - lower]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def rotation(
    position_ids: torch.Tensor, head_dim: int, base: float = 10000.0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (B, S, 1, head_dim / 2) of position * base^(-2k / head_dim): Su et al. 2021 (arXiv:2104.09864), eq. 15."""
    steps = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=dtype)
    angles = position_ids[..., None, None].to(dtype) * base ** (-steps / head_dim)
    return angles.cos(), angles.sin()


def rotated(tensor: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """(B, S, H, D) with element k rotated against element k + D/2, computed in the turn's dtype."""
    cosine, sine = turn
    first, second = tensor.to(cosine.dtype).chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).to(tensor.dtype)


def _positions(query: torch.Tensor, key_mask: torch.Tensor | Padding | None, cache: LayerCache | None, cu_seqlens: Any) -> torch.Tensor:
    """Position ids of the new tokens, (B or 1, S): contract, "Caches", without a cache as with an empty one."""
    length = query.shape[-2]
    if cache is not None and cu_seqlens is None:
        from .cache.positions import positions

        return positions(cache, length, key_mask.mask if isinstance(key_mask, Padding) else key_mask)
    slot = torch.arange(length, device=query.device)
    if cu_seqlens is not None:
        cu = cu_seqlens[0]
        row = segments(cu, slot)
        positions = slot - cu.long()[row]
        if cache is not None and cache.lengths.shape[0]:  # segment n goes on where row n of the cache ends
            positions = positions + cache.lengths.to(positions)[row]
        return positions if query.dim() == 2 else positions[None]
    if key_mask is None:
        return slot[None]
    mask = (key_mask.mask if isinstance(key_mask, Padding) else key_mask).long()
    return mask.cumsum(1) - mask


def _from_multihead_attention(module: Attention, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Turns the names of `nn.MultiheadAttention` into ours, as a state dict is loaded."""
    for added in ("bias_k", "bias_v"):
        if prefix + added in state:
            raise ValueError(
                f"state_dict: {prefix + added} adds a key slot of its own, which this layer has not; append it to key and value"
            )
    names = ("query_proj", "key_proj", "value_proj")
    if (whole := state.pop(prefix + "in_proj_weight", None)) is not None:
        for name, part in zip(names, whole.chunk(3)):
            state[f"{prefix}{name}.weight"] = part
    for name, theirs in zip(names, ("q_proj_weight", "k_proj_weight", "v_proj_weight")):
        if prefix + theirs in state:
            state[f"{prefix}{name}.weight"] = state.pop(prefix + theirs)
    if (whole := state.pop(prefix + "in_proj_bias", None)) is not None:
        for name, part in zip(names, whole.chunk(3)):
            state[f"{prefix}{name}.bias"] = part
