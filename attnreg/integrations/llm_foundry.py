"""llm-foundry's models on attnreg: functions with the signatures of its `attention_implementations` registry, and `register()`.

What an MPT model gives its attention differs by the name of the implementation: "torch" gets masks and a bias, "flash" gets packed
indices and alibi slopes. So there are two functions, and `register` can put them in the places of those two names.

Differences from its own: a row that sees nothing is 0, not a mean of the values (its masks write the smallest number of a dtype, taken
here as not seen); several queries after a past are allowed; heads are never repeated.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ..attention import attention
from ..packing import Packed, pack, unpack

Past = tuple[torch.Tensor, torch.Tensor] | tuple[()]
NAMES = ("torch", "flash")


def register(replace: Collection[str] = ()) -> None:
    """Adds "attnreg" to llm-foundry's registry, for its attention classes built with `attn_impl="attnreg"`.

    replace: which of its own names, "torch" and "flash", run on attnreg from now on. MPT's model code knows only these two, so a whole
        model takes `replace={"torch"}` and its own setting.

    Raises ImportError when llm-foundry is not installed, ValueError for another name.
    """
    if isinstance(replace, str) or set(replace) - set(NAMES):
        raise ValueError(f"replace: a set of names among {', '.join(NAMES)}, got {replace!r}")
    try:
        from llmfoundry.layers_registry import attention_implementations
    except ImportError as error:
        raise ImportError(f"llm-foundry is not installed, or not whole ({error}); pip install llm-foundry") from error
    attention_implementations.register("attnreg", func=scaled_multihead_dot_product_attention)
    functions = {"torch": scaled_multihead_dot_product_attention, "flash": flash_attn_fn}
    for name in replace:
        attention_implementations.register(name, func=functions[name])


def scaled_multihead_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    n_heads: int,
    kv_n_heads: int,
    past_key_value: Past | None = None,
    softmax_scale: float | None = None,
    attn_bias: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    training: bool = False,
    needs_weights: bool = False,
    attn_logit_softcapping: float | None = None,
    sliding_window_size: int = -1,
) -> tuple[torch.Tensor, None, Past | None]:
    """In the place of its "torch": query (B, S, n_heads * D), key and value (B, T, kv_n_heads * D), all flat.

    past_key_value: keys (B, kv_n_heads, D, P) and values (B, kv_n_heads, P, D); () starts a past; None keeps none.
    attn_bias: 4-D; one of a longer model is cut to its last rows and columns.
    key_padding_mask: (B, P + T), True for a real token. sliding_window_size: slots on each side besides the query's own; -1 is none.

    Returns the output (B, S, n_heads * D), None and the past with key and value. Raises NotImplementedError for `needs_weights`.
    """
    _no_weights(needs_weights)
    keys = key.unflatten(2, (kv_n_heads, -1)).transpose(1, 2)
    values = value.unflatten(2, (kv_n_heads, -1)).transpose(1, 2)
    if past_key_value is not None:
        if len(past_key_value):
            _check_past(past_key_value, keys, (0, 1, 3), 2)
            keys = torch.cat([past_key_value[0].transpose(2, 3), keys], 2)
            values = torch.cat([past_key_value[1], values], 2)
        past_key_value = (keys.transpose(2, 3), values)
    queries = query.unflatten(2, (n_heads, -1)).transpose(1, 2)
    if attn_bias is not None:
        if attn_bias.dim() != 4:
            raise ValueError(f"attn_bias: 4-D, (B or 1, heads or 1, S or 1, T), got shape {tuple(attn_bias.shape)}")
        if not attn_bias.dtype.is_floating_point:
            raise TypeError(f"attn_bias: a floating tensor that is added to the scores, got {attn_bias.dtype}")
        attn_bias = attn_bias[:, :, -queries.shape[2] :, -keys.shape[2] :]
        # Its masks add the smallest number of the dtype, here and there below some alibi.
        attn_bias = attn_bias.masked_fill(attn_bias <= torch.finfo(attn_bias.dtype).min / 2, float("-inf"))
    output = attention(
        queries, keys, values, causal=is_causal, window=_window(sliding_window_size), key_mask=key_padding_mask, bias=attn_bias,
        softcap=attn_logit_softcapping, scale=softmax_scale, dropout_p=dropout_p if training else 0.0, layout="bhsd",
        n_heads=n_heads, n_kv_heads=kv_n_heads,
    )  # fmt: skip
    return output.transpose(1, 2).flatten(2), None, past_key_value


def flash_attn_fn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    n_heads: int,
    kv_n_heads: int,
    past_key_value: Past | None = None,
    softmax_scale: float | None = None,
    attn_bias: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    training: bool = False,
    needs_weights: bool = False,
    should_repeat_kv_for_gqa: bool | None = True,
    sliding_window_size: int = -1,
    alibi_slopes: torch.Tensor | None = None,
    flash_attn_padding_info: dict[str, Any] | None = None,
    attn_logit_softcapping: float | None = None,
) -> tuple[torch.Tensor, None, Past | None]:
    """In the place of its "flash": the real tokens are attended to as packed rows, as `flash_attn_padding_info` says.

    past_key_value: keys and values, (B, P, kv_n_heads * D) each, flat; () starts a past; None keeps none.
    flash_attn_padding_info: indices_q, indices_k, indices_v of the real tokens in the flattened batch, cu_seqlens_q, cu_seqlens_k (several
        segments a row where sequence ids are), max_seqlen_q, max_seqlen_k. Causality, windows and alibi count within a segment.
    should_repeat_kv_for_gqa: asks how its own kernel gets grouped heads; no kernel here needs them repeated, so it changes nothing.

    Returns the output (B, S, n_heads * D), zeros at padding, None and the past with key and value.
    Raises ValueError for `key_padding_mask` and NotImplementedError for `attn_bias`, as its own does, and for `needs_weights`.
    """
    _no_weights(needs_weights)
    if key_padding_mask is not None:
        raise ValueError("key_padding_mask: None for the flash signature; the padding stands in flash_attn_padding_info")
    if flash_attn_padding_info is None:
        raise ValueError("flash_attn_padding_info: needed for the flash signature, got None")
    if attn_bias is not None:
        raise NotImplementedError("attn_bias: not in the flash signature, give alibi_slopes; attn_impl='torch' takes a bias")
    if past_key_value is not None:
        if len(past_key_value):
            _check_past(past_key_value, key, (0, 2), 1)
            key = torch.cat([past_key_value[0], key], 1)
            value = torch.cat([past_key_value[1], value], 1)
        past_key_value = (key, value)
    told = {n: t.to(query.device) if isinstance(t, torch.Tensor) else t for n, t in flash_attn_padding_info.items()}
    rows = {
        name: Packed(told[f"indices_{name}"], told[f"cu_seqlens_{cu}"], int(told[f"max_seqlen_{cu}"])) for name, cu in ("qq", "kk", "vk")
    }
    output = attention(
        pack(query, rows["q"]).unflatten(1, (n_heads, -1)),
        pack(key, rows["k"]).unflatten(1, (kv_n_heads, -1)),
        pack(value, rows["v"]).unflatten(1, (kv_n_heads, -1)),
        cu_seqlens=(rows["q"].cu_seqlens, rows["k"].cu_seqlens), max_seqlens=(rows["q"].max_seqlen, rows["k"].max_seqlen),
        causal=is_causal, window=_window(sliding_window_size), alibi_slopes=alibi_slopes, softcap=attn_logit_softcapping,
        scale=softmax_scale, dropout_p=dropout_p if training else 0.0, n_heads=n_heads, n_kv_heads=kv_n_heads,
    )  # fmt: skip
    return unpack(output.flatten(1), rows["q"], query.shape[0], query.shape[1]), None, past_key_value


def _window(size: int) -> tuple[int, int] | None:
    if size < -1:
        raise ValueError(f"sliding_window_size: slots on each side, or -1 for none, got {size}")
    return None if size == -1 else (size, size)


def _no_weights(needs_weights: bool) -> None:
    if needs_weights:
        raise NotImplementedError(
            "needs_weights: attention weights are not kept; use llm-foundry's own attn_impl='torch' where you read them"
        )


def _check_past(past: Past, new: torch.Tensor, same: tuple[int, ...], growing: int) -> None:
    """Says what was mixed up, where `torch.cat` would only complain of sizes - or not at all, when a past of the other layout fits."""
    keys, values = past
    if same == (0, 1, 3):
        keys = keys.transpose(2, 3) if keys.dim() == 4 else keys
    for name, old in (("keys", keys), ("values", values)):
        if old.dim() != new.dim() or any(old.shape[n] != new.shape[n] for n in same) or keys.shape[growing] != values.shape[growing]:
            raise ValueError(
                f"past_key_value: {name} of shape {tuple(old.shape)} don't go before new ones of {tuple(new.shape)} (in the order of the past); "
                "the 'torch' and 'flash' implementations keep their pasts in different layouts"
            )
