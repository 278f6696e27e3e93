"""Numbers, masks, lengths, and what is given once a head."""

from __future__ import annotations

import math
import os
import sys
from typing import TYPE_CHECKING, Any

import torch

from .. import packing
from ..looked import traced
from .numbers import whole_numbers
from .tensors import autocast, check_device, check_tensor

if TYPE_CHECKING:
    from ..call import AttentionCall

CHECK_DEVICE = os.environ.get("ATTNREG_CHECK", "").strip().lower() not in ("", "0", "false", "no", "off")
"""Whether device-side assertions look at lengths and cu_seqlens on a GPU (they are always looked at on a CPU)."""


def take_numbers(call: AttentionCall, window: Any, softcap: Any, scale: Any, dropout_p: Any) -> None:
    if window is not None:
        if isinstance(window, int):
            raise TypeError(
                f"window: a pair (left, right) of slots besides the query's own, None for unlimited; got {window!r}. transformers, xformers and "
                f"aten count the query itself: their window of W is (W - 1, 0) with causal=True"
            )
        if not isinstance(window, tuple) or len(window) != 2:
            raise TypeError(f"window: a pair (left, right), got {window!r}")
        for side in window:
            if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
                raise TypeError(f"window: whole numbers or None, got {window!r}")
            if side is not None and side < 0:
                raise ValueError(f"window: no side below 0, got {window!r}; an unlimited side is None, not -1")
        # What no size reaches limits nothing, and kernels count in 32 bits. Under causal the right side says nothing more.
        left, right = (None if side is None or side >= 2**31 - 1 else side for side in window)
        right = None if call.causal else right
        if left is not None or right is not None:
            call.window = (left, right)
    if softcap is not None:
        call.softcap = _positive("softcap", softcap, "; no cap is None")
    call.scale = 1.0 / math.sqrt(call.head_dim) if scale is None else _positive("scale", scale, "; the default is 1/sqrt(head dim)")
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p: a number, got {dropout_p!r}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: at least 0 and below 1, got {dropout_p!r}")
    call.dropout_p = float(dropout_p)


def take_masks(call: AttentionCall, query_mask: Any, key_mask: Any, mask: Any, bias: Any) -> None:
    for side, given, length in (("query", query_mask, call.query_length), ("key", key_mask, call.key_length)):
        if given is None:
            continue
        if isinstance(given, packing.Padding):
            setattr(call, f"{side}_padding", packing.known(given))
            given = given.mask
        name, size = f"{side}_mask", "Sq" if side == "query" else "Sk"
        _check_bool(name, given)
        if tuple(given.shape) != (call.batch, length):
            raise ValueError(f"{name}: shape (B, {size}) = {(call.batch, length)}, got {tuple(given.shape)}")
        check_device(call, name, given)
        setattr(call, name, given)
    if mask is not None:
        _check_bool("mask", mask)
        _check_broadcast(call, "mask", mask)
        call.mask = mask
    if bias is not None:
        check_tensor("bias", bias)
        if not bias.dtype.is_floating_point:
            raise TypeError(
                f"bias: a floating tensor that is added to the scores, got {bias.dtype}; a bool tensor (True = may attend) is mask="
            )
        _check_broadcast(call, "bias", bias)
        call.bias = autocast(bias)


def _check_broadcast(call: AttentionCall, name: str, tensor: torch.Tensor) -> None:
    whole = (call.batch, call.query_heads, call.query_length, call.key_length)
    if tensor.dim() != 4:
        raise ValueError(
            f"{name}: 4-D, each dimension that of (B, Hq, Sq, Sk) = {whole} or 1, got shape {tuple(tensor.shape)}; say which dimensions are "
            f"meant with {name}[:, None] or {name}[None, None]; a (B, Sk) padding mask is key_mask="
        )
    # Not "n not in (1, m)": the compiler takes a number for no member where m is a symbolic size, of whatever value.
    if any(n != 1 and n != m for n, m in zip(tensor.shape, whole)):
        raise ValueError(f"{name}: each dimension that of (B, Hq, Sq, Sk) = {whole} or 1, got shape {tuple(tensor.shape)}")
    check_device(call, name, tensor)


def take_lengths(call: AttentionCall, key_lengths: Any, query_lengths: Any, key_starts: Any) -> None:
    as_given: dict[str, torch.Tensor] = {}
    for name, given, size in (
        ("key_lengths", key_lengths, call.key_length),
        ("query_lengths", query_lengths, call.query_length),
        ("key_starts", key_starts, call.key_length),
    ):
        if given is None:
            continue
        if isinstance(given, (list, tuple)):
            numbers = whole_numbers(name, given)
            if any(not 0 <= n <= size for n in numbers):
                raise ValueError(f"{name}: each between 0 and {size}, got {numbers}")
            given = torch.tensor(numbers, dtype=torch.int32 if size < 2**31 else torch.int64, device="cpu")
        elif not isinstance(given, torch.Tensor):
            raise TypeError(f"{name}: whole numbers, one a row, as a list or a tensor, got {given!r}")
        check_tensor(name, given)
        as_given[name] = given
        if given.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: an int32 or int64 tensor or a list of numbers, got {given.dtype}")
        if tuple(given.shape) != (call.batch,):
            raise ValueError(f"{name}: one number a row, shape (B,) = {(call.batch,)}, got {tuple(given.shape)}")
        if given.device.type == "cpu" and not traced(given):
            values = given.tolist()
            if any(not 0 <= n <= size for n in values):
                raise ValueError(f"{name}: each between 0 and {size}, got {values}")
            given = given.to(call.device, non_blocking=True)
        else:
            check_device(call, name, given)
            if CHECK_DEVICE:
                torch._assert_async(((given >= 0) & (given <= size)).all(), f"{name}: each between 0 and {size}")
            given = given.clamp(0, size)
        setattr(call, name, given)
    if as_given:
        call.lengths_given = as_given


def take_head_terms(call: AttentionCall, alibi_slopes: Any, sinks: Any) -> None:
    heads = call.query_heads
    for name, given, shapes in (("alibi_slopes", alibi_slopes, ((heads,), (call.batch, heads))), ("sinks", sinks, ((heads,),))):
        if given is None:
            continue
        check_tensor(name, given)
        if not given.dtype.is_floating_point:
            raise TypeError(f"{name}: a floating tensor, got {given.dtype}")
        if tuple(given.shape) not in shapes:
            raise ValueError(f"{name}: shape {' or '.join(map(str, shapes))}, one number a query head, got {tuple(given.shape)}")
        check_device(call, name, given)
        setattr(call, name, given)


def _check_bool(name: str, given: Any) -> None:
    check_tensor(name, given)
    if given.dtype != torch.bool:
        how = (
            f"({name} != 0)"
            if not given.dtype.is_floating_point
            else f"({name} >= 0) if it holds 0 and -inf, ({name} != 0) if it holds ones for real tokens"
        )
        raise TypeError(
            f"{name}: a bool tensor, True = may be attended to (a real token), got {given.dtype}; convert it with {how}, or add it as bias="
        )


def _positive(name: str, given: Any, hint: str) -> float:
    if isinstance(given, torch.Tensor) or isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"{name}: a number, got {type(given).__name__}{hint}")
    if not (0 < given <= sys.float_info.max):
        raise ValueError(f"{name}: above 0 and finite, got {given!r}{hint}")
    return float(given)
