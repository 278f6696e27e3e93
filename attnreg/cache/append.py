"""New tokens into a cache by one launch of a Triton kernel (`append_kernel`), which counts them too.

By torch's operations an append is five launches of two or three microseconds each, beside an attention kernel of forty. Inside of compiled
regions they stay: there the compiler fuses them. Triton comes with torch for CUDA; where it does not, or can't compile, they do it as well.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.autograd.graph import increment_version

FEW = 16
"""Tokens a row up to which one program a row is quick. No two programs touch a row, so that lengths need no synchronisation."""

_launched: dict[tuple, Callable[..., None] | None] = {}
"""The kinds of call that have been launched before, which are compiled, and may go into a CUDA graph; each with its shorter way."""


def taken(key: torch.Tensor) -> bool:
    """Whether new tokens on this device may go by the kernel."""
    return key.is_cuda and not torch.compiler.is_compiling()


def in_one_launch(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    room: int,
    counts: torch.Tensor | None = None,
    asked: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> bool:
    """Writes row b's first `counts[b]` new tokens from slot `lengths[b]` on, and adds them to `lengths[b]`. A row without room for all of
    them appends none. Returns False, with nothing done, where torch's operations have to do it.

    key, value: (B, n, Hkv, D) and (B, n, Hkv, Dv), of any strides. lengths: (B,) int32. counts: (B,) integers, clamped to 0 to n; None for n.
    Without `table` keys and values are contiguous (B, room + 1, Hkv, D), `room` is the capacity, and `asked` (B,) int32, what lengths would
    be without it, is counted on whether a row has room or not. With `table` (B, pages) int32 they are pools of contiguous pages
    (pages, room, Hkv, D), and every row has room.
    """
    if key.shape[1] > FEW or not taken(key):
        return False
    unused = lengths.data_ptr()
    pointers = (
        key.data_ptr(), value.data_ptr(), keys.data_ptr(), values.data_ptr(), unused, unused if asked is None else asked.data_ptr(),
        unused if counts is None else counts.data_ptr(), unused if table is None else table.data_ptr(),
    )  # fmt: skip
    aligned = not functools.reduce(operator.or_, pointers) % 16
    counted = counts if counts is None else counts.dtype
    # Strides and alignment are part of what the kernel is compiled for.
    kind = (key.dtype, key.shape, value.shape, key.stride(), value.stride(), key.device, counted, table is None, aligned)
    known = kind in _launched
    if not known and key.is_cuda and torch.cuda.is_current_stream_capturing():
        return False  # compiling, and loading what was compiled, is no part of a graph
    function = _kernel()
    if function is None:
        return False
    elsewhere = key.is_cuda and key.device.index != torch.cuda.current_device()
    try:
        with torch.cuda.device(key.device) if elsewhere else nullcontext():
            again = _launched.get(kind)
            if again is not None:
                again(pointers, room, 0 if table is None else table.stride(0))
            else:
                again = function(key, value, keys, values, lengths, room, counts, asked, table)
    except Exception as error:
        if known:
            raise
        _without(error)
        return False
    if not known:
        # Of unaligned tensors one differs from the next in which of them are.
        _launched[kind] = again if aligned else None
    increment_version(lengths)  # what was made of them before is known by that to be old
    return True


@functools.cache
def _kernel() -> Callable | None:
    try:
        from .append_kernel import append
    except ImportError:
        return None
    except Exception as error:
        warnings.warn(f"attnreg: caches append by torch's operations, since Triton can't be imported: {error}", stacklevel=2)
        return None
    return append


def _without(error: Exception) -> None:
    """From here on as where there is no Triton. It wants a C compiler, and a cache must not depend on one."""
    global _kernel
    warnings.warn(f"attnreg: caches append by torch's operations, since Triton's kernel failed: {error}", stacklevel=3)
    _kernel = lambda: None
