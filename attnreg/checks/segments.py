"""Packed rows: where each segment starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..looked import traced
from .options import CHECK_DEVICE
from .tensors import check_device, check_tensor

if TYPE_CHECKING:
    from ..call import AttentionCall


def take_segments(call: AttentionCall, cu_seqlens: Any, max_seqlens: Any) -> None:
    if cu_seqlens is None:
        if max_seqlens is not None:
            raise ValueError("max_seqlens: goes with cu_seqlens, which was not given")
        return
    others = ("query_mask", "key_mask", "key_lengths", "query_lengths", "key_starts")
    clash = [name for name in others if getattr(call, name) is not None]
    if clash:
        raise ValueError(f"cu_seqlens: not together with {', '.join(clash)}; packed rows have no padding to describe")
    if not isinstance(cu_seqlens, tuple) or len(cu_seqlens) != 2:
        raise TypeError("cu_seqlens: a pair (cu_q, cu_k) of cumulative starts; for self-attention give the same tensor twice")
    if call.batch != 1:
        raise ValueError(f"cu_seqlens: packed rows have batch size 1, or shape (T, H, D); got batch size {call.batch}")
    call.repeatable = False
    for name, cu, size in (("cu_seqlens[0]", cu_seqlens[0], call.query_length), ("cu_seqlens[1]", cu_seqlens[1], call.key_length)):
        check_tensor(name, cu)
        if cu.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: int32 or int64, got {cu.dtype}")
        if cu.dim() != 1 or cu.shape[0] < 1:
            raise ValueError(f"{name}: one dimension, (segments + 1,), got shape {tuple(cu.shape)}")
        check_device(call, name, cu)
        if cu.device.type != "cpu" or traced(cu):
            if CHECK_DEVICE or cu.device.type == "cpu":
                right = (cu[0] == 0) & (cu[1:] >= cu[:-1]).all() & (cu[-1] <= size)
                torch._assert_async(right, f"{name}: starts at 0, never decreases, ends at or before {size}")
        else:
            check_starts(name, cu.tolist(), size)
    if cu_seqlens[0].shape != cu_seqlens[1].shape:
        raise ValueError(
            f"cu_seqlens: as many segments for queries as for keys, got {cu_seqlens[0].shape[0] - 1} and {cu_seqlens[1].shape[0] - 1}"
        )
    if max_seqlens is not None:
        if (
            not isinstance(max_seqlens, tuple)
            or len(max_seqlens) != 2
            or any(isinstance(n, bool) or not isinstance(n, int) for n in max_seqlens)
        ):
            raise TypeError(f"max_seqlens: a pair of whole numbers (longest query segment, longest key segment), got {max_seqlens!r}")
        if any(n < 0 for n in max_seqlens):
            raise ValueError(f"max_seqlens: none below 0, got {max_seqlens!r}")
        _check_longest(call, cu_seqlens, max_seqlens)
    call.cu_seqlens, call.max_seqlens = cu_seqlens, max_seqlens


def check_starts(name: str, starts: list[int], size: int) -> None:
    if starts[0] != 0:
        raise ValueError(f"{name}: starts at 0, got {starts}")
    if any(b < a for a, b in zip(starts, starts[1:])):
        raise ValueError(f"{name}: never decreases, got {starts}")
    if starts[-1] > size:
        raise ValueError(f"{name}: ends at or before the number of rows, {size}, got {starts}")


def _check_longest(call: AttentionCall, cu_seqlens: tuple[torch.Tensor, torch.Tensor], max_seqlens: tuple[int, int]) -> None:
    """A maximum that is too small would leave rows unread: checked where the segments can be seen."""
    for side, cu, longest in (("query", cu_seqlens[0], max_seqlens[0]), ("key", cu_seqlens[1], max_seqlens[1])):
        if cu.shape[0] < 2:
            continue
        if cu.device.type == "cpu" and not traced(cu):
            if int(cu.diff().max()) > longest:
                raise ValueError(f"max_seqlens: the longest {side} segment has {int(cu.diff().max())} rows, got {longest}")
        elif CHECK_DEVICE:
            torch._assert_async((cu.diff() <= longest).all(), f"max_seqlens: a {side} segment is longer than {longest}")
