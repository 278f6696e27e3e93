"""The kernel of `append`, imported with Triton when the first token on a GPU is appended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit
def _put(source, target, head_stride, dim_stride, kept, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """One token of `source` (HEADS, DIM), strided, to `target`, contiguous."""
    for start in tl.static_range(0, HEADS * DIM, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = (i < HEADS * DIM) & kept
        token = tl.load(source + (i // DIM).to(tl.int64) * head_stride + (i % DIM) * dim_stride, mask=inside)
        tl.store(target + i, token, mask=inside)


@triton.jit(do_not_specialize=["room", "table_row"])
def _append(
    key, value, keys, values, lengths, asked, counts, table,
    key_row, key_token, key_head, key_dim, value_row, value_token, value_head, value_dim, n, room, table_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    COUNTED: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    count = n
    if COUNTED:
        count = tl.minimum(tl.maximum(tl.load(counts + row).to(tl.int32), 0), n)
    after = length + count
    if not PAGED:
        wanted = tl.load(asked + row) + count
        fits = wanted <= room
        after = tl.where(fits, wanted, length)
    for number in range(n):
        slot = length + number
        kept = slot < after
        if PAGED:
            page = tl.load(table + row * table_row + slot // room, mask=kept, other=0)
            place = page.to(tl.int64) * room + slot % room
        else:
            place = row * (room + 1) + slot
        source = key + row * key_row + number * key_token
        _put(source, keys + place * (HEADS * DIM), key_head, key_dim, kept, HEADS, DIM, BLOCK)
        source = value + row * value_row + number * value_token
        _put(source, values + place * (HEADS * VALUE_DIM), value_head, value_dim, kept, HEADS, VALUE_DIM, VALUE_BLOCK)
    # Every thread has read the counters before one of them writes them.
    tl.debug_barrier()
    tl.store(lengths + row, after)
    if not PAGED:
        tl.store(asked + row, wanted)


def append(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    room: int,
    counts: torch.Tensor | None,
    asked: torch.Tensor | None,
    table: torch.Tensor | None,
) -> Callable[..., None] | None:
    """See `append.in_one_launch`. Returns `again(pointers, room, table_row)`, which does it for other tensors of the same kinds; None where
    there is no shorter way. Whether pointers are multiples of 16 is part of the kind."""
    rows, n, heads, dim = key.shape
    if not rows:
        return None
    if key.element_size() == 1:  # not every card's Triton has a float of 8 bits; a copy needs none
        key, value, keys, values = (tensor.view(torch.uint8) for tensor in (key, value, keys, values))
    value_dim = value.shape[3]
    strides = (*key.stride(), *value.stride(), n)
    constants = (heads, dim, value_dim, _block(heads * dim), _block(heads * value_dim), counts is not None, table is not None)
    compiled = _append[(rows,)](
        key, value, keys, values, lengths, lengths if asked is None else asked, lengths if counts is None else counts,
        lengths if table is None else table, *strides, room, 0 if table is None else table.stride(0), *constants,
    )  # fmt: skip
    return _shorter(compiled, rows, strides, constants)


def _shorter(compiled: Any, rows: int, strides: tuple[int, ...], constants: tuple) -> Callable[..., None] | None:
    """The launch of what is compiled: through `_append`, which looks at every argument to find it, the host needs three times as long."""
    try:
        compiled[(0, 1, 1)](*[0] * 8, *strides, 0, 0, *constants)  # launches nothing, and shows that the arguments are taken
        launch = compiled[(rows, 1, 1)]
    except Exception:  # another Triton, or its interpreter
        return None
    return lambda pointers, room, table_row: launch(*pointers, *strides, room, table_row, *constants)


def _block(size: int) -> int:
    return min(1 << max(size - 1, 0).bit_length(), _BLOCK)
