"""The real tokens of a call laid one behind the other, for kernels that take segments, and the way back.

Three kinds of calls come here: packed rows, which lie so already; padded ones, whose padding is dropped; and plain batches, where every
row is a segment.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ..call import AttentionCall
from ..packing import Padding
from ..visibility import real_keys, real_queries

NEGATIVE_INFINITY = float("-inf")


class Rows(NamedTuple):
    """Queries, keys and values as segments. With a paged cache `key` and `value` are its pages."""

    query: torch.Tensor
    """(Tq, Hq, D)"""
    key: torch.Tensor
    value: torch.Tensor
    cu_query: torch.Tensor
    """(N + 1,) int32"""
    cu_key: torch.Tensor
    longest: tuple[int, int]
    """Longest segment of queries and of keys, or an upper bound."""
    lengths: tuple[list[int] | None, list[int] | None]
    """Length of each segment, where the host knows it."""
    batch: int
    size: int
    """The output is (batch, size, Hq, Dv)."""
    indices: torch.Tensor | None = None
    """Where each query row belongs in (batch * size); None: in order, from the start."""
    real: torch.Tensor | None = None
    """Query rows that belong to a segment, (Tq,) bool, where some past the end might not."""
    every_segment_asks: bool = False
    """No segment is known to be without a query."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute: no query, no key or no segment."""
        return self.query.shape[0] == 0 or self.key.shape[0] == 0 or self.cu_query.shape[0] < 2 or 0 in self.longest

    def restored(self, rows: torch.Tensor) -> torch.Tensor:
        """(Tq, Hq, Dv) back to (B, Sq, Hq, Dv), zeros at padding."""
        total = self.batch * self.size
        if self.indices is not None:
            rows = rows.new_zeros((total, *rows.shape[1:])).index_copy(0, self.indices, rows)
        else:
            if self.real is not None:
                rows = rows.masked_fill(~self.real[:, None, None], 0.0)
            if rows.shape[0] < total:
                rows = pad(rows, (0, 0, 0, 0, 0, total - rows.shape[0]))
        return rows.unflatten(0, (self.batch, self.size))

    def restored_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """(Hq, Tq) to (B, Hq, Sq), -inf at padding."""
        total = self.batch * self.size
        if self.indices is not None:
            lse = lse.new_full((lse.shape[0], total), NEGATIVE_INFINITY).index_copy(1, self.indices, lse)
        else:
            if self.real is not None:
                lse = lse.masked_fill(~self.real, NEGATIVE_INFINITY)
            if lse.shape[1] < total:
                lse = pad(lse, (0, total - lse.shape[1]), value=NEGATIVE_INFINITY)
        return lse.unflatten(1, (self.batch, self.size)).transpose(0, 1)

    def nothing(self, call: AttentionCall) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The result where no query sees a key."""
        output = call.zeros()
        if not call.return_lse:
            return output
        shape = (self.batch, call.query_heads, self.size)
        return output, torch.full(shape, NEGATIVE_INFINITY, dtype=torch.float32, device=call.device)


def rows_of(call: AttentionCall) -> Rows:
    """The call's real tokens as segments; its layout is (B, S, H, D).

    Padding may be dropped only where the spec says `padding_fits_packing`. The host reads the device where it must: lengths of bare
    `cu_seqlens` (spared by `max_seqlens`), and the number of real tokens (spared by `Padding` with known lengths).
    """
    if call.cu_seqlens is not None:
        return _of_segments(call)
    batch, size = call.batch, call.query_length
    query_padding = _padding(real_queries(call), call.query_padding, alone=call.query_lengths is None)
    query, cu_query, longest_query, query_lengths, indices = _side((call.query,), query_padding, batch, size)
    asked = query_padding is None
    if call.pages is not None:
        lengths = call.key_lengths
        if lengths is None:
            lengths = torch.full((batch,), call.key_length, dtype=torch.int32, device=call.device)
        cu_key = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        longest, known = (longest_query, call.key_length), (query_lengths, None)
        pages = call.pages
        return Rows(*query, pages.keys, pages.values, cu_query, cu_key, longest, known, batch, size, indices, every_segment_asks=asked)
    key_padding = _padding(real_keys(call), call.key_padding, alone=call.key_lengths is None and call.key_starts is None)
    (key, value), cu_key, longest_key, key_lengths, _ = _side((call.key, call.value), key_padding, batch, call.key_length)
    longest, known = (longest_query, longest_key), (query_lengths, key_lengths)
    return Rows(*query, key, value, cu_query, cu_key, longest, known, batch, size, indices, every_segment_asks=asked)


def _padding(real: torch.Tensor | None, declared: Padding | None, *, alone: bool) -> Padding | None:
    if real is None:
        return None
    return declared if declared is not None and alone else Padding(real, "any")


def _side(tensors: tuple[torch.Tensor, ...], padding: Padding | None, batch: int, size: int) -> tuple:
    """Rows, cu_seqlens, longest, lengths on the host, and indices, of the queries or of the keys."""
    flat = [t.flatten(0, 1) for t in tensors]
    if padding is None:
        cu = torch.arange(0, (batch + 1) * size, size, dtype=torch.int32, device=tensors[0].device)
        return flat, cu, size, [size] * batch, None
    packed = padding.packed
    rows = [t.index_select(0, packed.indices) for t in flat]
    lengths = None if padding.host_lengths is None else list(padding.host_lengths)
    return rows, packed.cu_seqlens, packed.max_seqlen, lengths, packed.indices


def _of_segments(call: AttentionCall) -> Rows:
    cu_query, cu_key = (cu.to(torch.int32) for cu in call.cu_seqlens)
    query, key, value = (t.squeeze(0) for t in (call.query, call.key, call.value))
    size = call.query_length
    spec = call.spec
    if call.max_seqlens is None and not (spec.compiling or spec.capturing):
        # One copy to the host tells everything: the longest segments, and where the last ones end.
        starts = torch.cat([cu_query, cu_key]).tolist()
        of_query, of_key = starts[: cu_query.shape[0]], starts[cu_query.shape[0] :]
        lengths = tuple([b - a for a, b in zip(side, side[1:])] for side in (of_query, of_key))
        longest = (max(lengths[0], default=0), max(lengths[1], default=0))
        query, key, value = query[: of_query[-1]], key[: of_key[-1]], value[: of_key[-1]]
        return Rows(query, key, value, cu_query, cu_key, longest, lengths, 1, size)
    longest = call.max_seqlens or (size, call.key_length)
    # Whether rows lie past the last segment only the device knows; the kernels leave output and gradients there as they find them.
    real = torch.arange(size, device=call.device) < cu_query[-1]
    if spec.gradients:
        held = torch.arange(call.key_length, device=call.device) < cu_key[-1]
        query = query.masked_fill(~real[:, None, None], 0.0)
        key, value = (t.masked_fill(~held[:, None, None], 0.0) for t in (key, value))
    return Rows(query, key, value, cu_query, cu_key, longest, (None, None), 1, size, real=real)
