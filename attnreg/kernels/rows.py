"""The real tokens of a call as segments, for kernels that take such, and the way back.

Four kinds of calls come here: packed rows, which lie so already; plain batches, where every row is a segment; padded ones whose real tokens
are one run of slots in each row, which are named where they lie (`runs_of`); and other padded ones, whose padding is dropped in a copy.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ..call import AttentionCall
from ..looked import traced, transforming
from ..packing import Padding, keep, to_be_kept
from ..spec import AttentionSpec
from ..visibility import real_keys, real_queries
from .lse import NEGATIVE_INFINITY

FEW_REAL = 1 / 3
"""Real tokens, as a part of all, below which training gathers them: the backward's work on a padded token (dq in float32, twice; key and value
gradients for each query head) is then more than gathering takes. Measured on an H200 (benchmarks/direct.py): with four query heads to a key head
the two are even at about 0.4; with one, in place is ahead or even at any part."""

MOST_SEGMENTS = 65535
"""As many as one launch takes."""


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
    each: int = 1
    """Segments for each row of a batch; what follows the last row's belongs to no row."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute: no query, no key or no segment."""
        return self.query.shape[0] == 0 or self.key.shape[0] == 0 or self.cu_query.shape[0] < 2 or 0 in self.longest

    def by_segment(self, rows: torch.Tensor) -> torch.Tensor:
        """What is given for each row of the batch, (B, ...), for each segment: (N, ...)."""
        number = torch.arange(self.cu_query.shape[0] - 1, device=rows.device) // self.each
        return rows[number.clamp(max=self.batch - 1)]

    def restored(self, rows: torch.Tensor) -> torch.Tensor:
        """(Tq, Hq, Dv) back to (B, Sq, Hq, Dv), zeros at padding."""
        total = self.batch * self.size
        if self.indices is not None:
            rows = rows.new_zeros((total, *rows.shape[1:])).index_copy_(0, self.indices, rows)
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
            lse = lse.new_full((lse.shape[0], total), NEGATIVE_INFINITY).index_copy_(1, self.indices, lse)
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
        cu_key = pad(call.key_ends.cumsum(0, dtype=torch.int32), (1, 0))
        longest, known = (longest_query, call.key_length), (query_lengths, None)
        pages = call.pages
        return Rows(*query, pages.keys, pages.values, cu_query, cu_key, longest, known, batch, size, indices, every_segment_asks=asked)
    key_padding = _padding(real_keys(call), call.key_padding, alone=call.key_lengths is None and call.key_starts is None)
    (key, value), cu_key, longest_key, key_lengths, _ = _side((call.key, call.value), key_padding, batch, call.key_length)
    longest, known = (longest_query, longest_key), (query_lengths, key_lengths)
    return Rows(*query, key, value, cu_query, cu_key, longest, known, batch, size, indices, every_segment_asks=asked)


def lies_in_runs(spec: AttentionSpec) -> bool:
    """Whether a padded call is known to have its real queries, and its real keys, in one run of slots in each row."""
    if not spec.padded or spec.packed or spec.page_size:
        return False
    if spec.sizes is not None and 3 * spec.sizes[0] + 2 > MOST_SEGMENTS:
        return False
    if (spec.key_mask and (spec.key_lengths or spec.key_starts)) or (spec.query_mask and spec.query_lengths):
        return False
    return "any" not in (spec.key_mask, spec.query_mask)


def notes_of_runs(spec: AttentionSpec) -> list[str]:
    notes = ["padding stays where it is, as segments without keys or without queries, which the kernel fills with zeros"]
    if spec.gradients:
        notes.append(f"gathers the real tokens after all where the host knows that they are less than {FEW_REAL:.0%}")
    return notes


def runs_of(call: AttentionCall) -> Rows:
    """The call's rows as they lie, without a copy (but see `FEW_REAL`); its layout is (B, S, H, D), and `lies_in_runs` holds for its spec.

    What lies between the runs is made of segments too: padded queries are one without keys, padded keys one without queries. So the kernel
    itself writes zeros to the output and the gradients there (and an empty lse), and reads no value of padding. Nothing is asked of the
    device, and every shape is known beforehand. Only for kernels that write those zeros.
    """
    if call.spec.gradients and _known_to_be_few(call):
        return rows_of(call)
    batch, sizes = call.batch, (call.query_length, call.key_length)
    paddings = [p for p in (call.key_padding, call.query_padding) if p is not None]
    query = call.query_padding
    # Lengths and starts are another call's another time, a traced or transformed call leaves nothing behind, and what is made in a graph
    # is of the graph.
    kept = paddings and not (call.key_lengths is not None or call.key_starts is not None or call.query_lengths is not None)
    kept = kept and not (call.spec.compiling or call.spec.capturing or traced(call.query) or transforming())
    question = (None if query is None else id(query), *sizes)
    known = paddings[0].runs.get(question) if kept else None
    if known is not None:
        marks = known[0]
    else:
        with to_be_kept() if kept else nullcontext():
            marks = _marks(call)
        if kept:
            # The other padding is kept, so that its id stays its own.
            keep(paddings[0].runs, question, (marks, None if query is paddings[0] else query))
    cu_query, cu_key, longest, each = marks
    tensors = (t.flatten(0, 1) for t in (call.query, call.key, call.value))
    return Rows(*tensors, cu_query, cu_key, longest, (None, None), batch, sizes[0], each=each)


def _known_to_be_few(call: AttentionCall) -> bool:
    """Whether the host knows that little of queries and keys is real. In a graph, the numbers could become others."""
    paddings = (call.query_padding, call.key_padding)
    if call.spec.compiling or call.spec.capturing or any(p is None or p.host_lengths is None for p in paddings):
        return False
    return sum(sum(p.host_lengths) for p in paddings) < FEW_REAL * sum(p.mask.numel() for p in paddings)


def _marks(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int], int]:
    queries = _run(call.query_length, call.query_padding, None, call.query_lengths)
    keys = _run(call.key_length, call.key_padding, call.key_starts, call.key_lengths)
    cu_query, cu_key, each = cu_seqlens_of_runs(queries[:2], keys[:2], call.batch, (call.query_length, call.key_length), call.device)
    return cu_query, cu_key, (queries[2], keys[2]), each


Bound = torch.Tensor | int


def _run(size: int, padding: Padding | None, starts: torch.Tensor | None, lengths: torch.Tensor | None) -> tuple[Bound, Bound, int]:
    """Where each row's run starts and ends, and the longest segment that can be: a run, or the gap between two."""
    if padding is not None:
        host = padding.host_lengths
        longest = max(*host, size - min(host)) if host else size
        return (size - padding.lengths, size, longest) if padding.form == "left" else (0, padding.lengths, longest)
    if starts is None:
        return 0, size if lengths is None else lengths, size
    # Such a gap may take the end of one row and the start of the next.
    return (starts, size, size) if lengths is None else (torch.minimum(starts, lengths), lengths, 2 * size)


def cu_seqlens_of_runs(
    queries: tuple[Bound, Bound], keys: tuple[Bound, Bound], batch: int, sizes: tuple[int, int], device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """cu_seqlens of queries and keys, (N + 1,) int32, over the rows of a batch as they lie, and the number of segments for each row.

    queries, keys: where each row's run starts and ends, (B,) or one number. A row's segments are the padded queries before its run, with
    no key; the padded keys before it, with no query; and the run. The two of padding follow once more after the last row. Where only one
    of the sides is padded, there is one segment of padding instead of two.
    """
    sides = []
    for (start, end), size in zip((queries, keys), sizes):
        first = torch.arange(batch, dtype=torch.int32, device=device) * size
        sides.append(((first + start).int(), (first + end).int(), batch * size))
    (q, q_end, q_total), (k, k_end, k_total) = sides
    padded = [isinstance(start, torch.Tensor) or isinstance(end, torch.Tensor) for start, end in (queries, keys)]
    if all(padded):
        cu_query = pad(pad(torch.stack([q, q, q_end], 1).flatten(), (1, 0)), (0, 2), value=q_total)
        cu_key = pad(pad(torch.stack([k, k_end, k_end], 1).flatten(), (2, 0)), (0, 1), value=k_total)
        return cu_query, cu_key, 3
    cu_query, cu_key = (pad(pad(torch.stack([start, end], 1).flatten(), (1, 0)), (0, 1), value=total) for start, end, total in sides)
    return cu_query, cu_key, 2


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
    rows = [_Taken.apply(t, packed.indices) for t in flat]
    lengths = None if padding.host_lengths is None else list(padding.host_lengths)
    return rows, packed.cu_seqlens, packed.max_seqlen, lengths, packed.indices


class _Taken(torch.autograd.Function):
    """Some rows, each once. `index_select` doesn't know the latter, and adds up their gradients atomically."""

    @staticmethod
    def forward(context, tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(indices)
        context.size = tensor.shape[0]
        return tensor.index_select(0, indices)

    @staticmethod
    def backward(context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (indices,) = context.saved_tensors
        return gradient.new_zeros((context.size, *gradient.shape[1:])).index_copy_(0, indices, gradient), None


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
