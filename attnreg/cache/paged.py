"""The cache in pages: rows of any length share one pool, come and go while others run, and may share a prefix.

A layer has its own pool and table; all layers of a cache are asked for the same, and so stay alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..checks.numbers import whole_number
from . import append
from .layers import Cache
from .pool import Pool
from .protocol import (
    Lengths,
    Pages,
    Step,
    check_new,
    host_counts,
    known_rows,
    on_device,
    put,
    refuse_gradient,
    row_numbers,
    shorter,
    storage_of,
    uniform,
    zeros,
)


class _New(NamedTuple):
    """What a step appends, where, and the tables as they will be."""

    key: torch.Tensor
    value: torch.Tensor
    tables: list[list[int]]
    after: list[int]
    starts: list[int]
    counts: list[int]
    fresh: list[int]
    copies: list[tuple[int, int]]
    table: torch.Tensor
    first: tuple[int, int] | None
    entries: list[tuple[int, int, int]]
    """Row, column and page that `table` does not hold yet."""
    counted: torch.Tensor | None
    """The lengths on the device, which `write` advances, or None."""
    taken: list[int]
    """Of the fresh pages those that `write` took, which `undo` gives back."""


def _first_pages(tables: list[list[int]]) -> tuple[int, int] | None:
    """`Pages.first`, where every row has as many pages, in order, and rows stand equally far apart."""
    if not tables or not tables[0] or any(len(table) != len(tables[0]) for table in tables):
        return None
    first = [table[0] for table in tables]
    step = first[1] - first[0] if len(first) > 1 else 1
    for b, table in enumerate(tables):
        if step < 1 or table[0] != first[0] + b * step or table != list(range(table[0], table[0] + len(table))):
            return None
    return first[0], step


class PagedLayer:
    """One layer: a pool of pages (pages, page_size, Hkv, D), and for each row a list of the pages that it holds."""

    def __init__(self, pool: Pool, rows: int) -> None:
        self.pool = pool
        self._tables: list[list[int]] = [[] for _ in range(rows)]
        self._lengths = [0] * rows
        self._table: torch.Tensor | None = None
        """The tables on the device, (B, room) with room for pages to come; made anew when None."""
        self._first: tuple[int, int] | None = None
        """`Pages.first` of the tables as they are in `_table`."""
        self._shown: tuple[Any, Any] = (None, None)
        """A table, and what the last step showed of it."""
        self._room: tuple[list[int] | None, int, int] = (None, 0, 0)
        """The lengths, and the count of pages that came to be shared, for which `_left` was found; and what it is."""
        self._counted: torch.Tensor | None = None
        """The lengths on a GPU, (B,) int32, kept there from step to step; made anew when None."""

    def __del__(self) -> None:
        # A fork that is dropped gives its pages back.
        for table in self.__dict__.get("_tables", ()):
            self.pool.release(table)

    @property
    def page_size(self) -> int:
        return self.pool.keys.shape[1]

    @property
    def lengths(self) -> torch.Tensor:
        return on_device(self._lengths, self.pool.keys.device)

    def slots(self, n_new: int) -> int:
        return max(self._lengths, default=0) + n_new

    def prepare(
        self, key: torch.Tensor | None, value: torch.Tensor | None, counts: Any, window: tuple | None, key_mask: torch.Tensor | None
    ) -> Step:
        starts, pool = self._lengths, self.pool
        if key is None:
            there = self._counts_there() if key_mask is None else None
            return self._step(*self._tabled(self._tables), starts, None, max(starts, default=0), there)
        if pool.keys.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("cache: a PagedCache can't append in a CUDA graph, since the host decides which pages; use StaticCache")
        check_new(key, value, pool.keys, pool.values, len(starts))
        refuse_gradient(key, value)
        if counts is None and key.shape[1] <= self._left():
            counts, after = [key.shape[1]] * len(starts), [n + key.shape[1] for n in starts]
            tables, fresh, copies, entries = self._tables, {}, [], []
        else:
            counts = host_counts(counts, len(starts), key.shape[1])
            after = [n + c for n, c in zip(starts, counts)]
            tables, fresh, copies, entries = self._pages_for(starts, after)
        table, first = self._tabled(tables, bool(copies))
        # What a key mask means for the choice is asked before `write`, and so the lengths are made anew then, as they will be.
        there = self._counts_there() if key.shape[1] <= append.FEW and key_mask is None else None
        entries = entries if table is self._table else []
        new = _New(key, value, tables, after, starts, counts, list(fresh), copies, table, first, entries, there, [])
        return self._step(table, first, after, new, max(starts, default=0) + key.shape[1], there)

    def _left(self) -> int:
        """How many tokens every row has room for in pages that it holds alone. Found anew when lengths change but by appending that many,
        or rows came to share pages."""
        lengths, holds, left = self._room
        if lengths is not self._lengths or holds != self.pool.holds:
            ends = [len(table) * self.page_size - n for table, n in zip(self._tables, self._lengths)]
            alone = all(table and self.pool.holders[table[-1]] == 1 for table in self._tables)
            left = min(ends, default=0) if alone and max(ends, default=0) <= self.page_size else 0
            self._room = (self._lengths, self.pool.holds, left)
        return left

    def _pages_for(
        self, starts: list[int], after: list[int]
    ) -> tuple[list[list[int]], dict[int, None], list[tuple[int, int]], list[tuple[int, int, int]]]:
        """The tables as they will be, pages to take, pages to copy, and entries (row, column, page) that are new in the tables."""
        pool, size = self.pool, self.page_size
        # Which pages will be used is known before they are taken: explain() must not take any. A page that others hold too is copied
        # before a row writes into it. Rows are kept in neighbouring pages, and apart from each other, where that is possible.
        tables, fresh, copies, entries = self._tables, {}, [], []
        others, apart, short = iter(pool.free), (len(pool.holders) - 1) // max(len(starts), 1), 0
        for b, (start, end) in enumerate(zip(starts, after)):
            for index in range(start // size, -(-end // size)) if end > start else ():
                shared = index < len(tables[b])
                if shared and pool.holders[tables[b][index]] == 1:
                    continue
                if short:  # only how many are missing is left to say
                    short += 1
                    continue
                page = tables[b][index - 1] + 1 if index else 1 + b * apart
                if page not in pool.free or page in fresh:
                    page = next((page for page in others if page not in fresh), None)
                if page is None:
                    short += 1
                    continue
                if tables is self._tables:
                    tables = [list(table) for table in tables]
                fresh[page] = None
                if shared:
                    copies.append((tables[b][index], page))
                    tables[b][index] = page
                else:
                    entries.append((b, index, page))
                    tables[b].append(page)
        if short:
            raise ValueError(
                f"cache: {len(fresh) + short} new pages of {size} slots needed, {len(fresh)} of {len(pool.holders) - 1} are free; "
                "free(rows) of finished requests, or make a larger PagedCache"
            )
        return tables, fresh, copies, entries

    def _counts_there(self) -> torch.Tensor | None:
        if self._counted is None and append.taken(self.pool.keys):
            with torch.inference_mode(False):
                self._counted = on_device(self._lengths, self.pool.keys.device)
        return self._counted

    def _tabled(self, tables: list[list[int]], changed: bool = False) -> tuple[torch.Tensor, tuple[int, int] | None]:
        """The tables on the device, and where their pages begin. New pages have their place there; `write` enters them."""
        widest = max(max(map(len, tables), default=0), 1)
        table, first = self._table, self._first
        if table is None or changed or widest > table.shape[1]:
            room = widest + widest // 4 + 4
            with torch.inference_mode(False):  # pages are entered in and outside of it
                table = on_device([t + [0] * (room - len(t)) for t in tables], self.pool.keys.device).reshape(len(tables), room)
        if tables is not self._tables or table is not self._table:
            first = _first_pages(tables)
        if tables is self._tables:
            self._table, self._first = table, first
        return table, first

    def _step(
        self,
        table: torch.Tensor,
        first: tuple[int, int] | None,
        lengths: list[int],
        new: Any,
        slots: int,
        there: torch.Tensor | None,
    ) -> Step:
        longest, device = max(lengths, default=0), self.pool.keys.device
        width = max(-(-longest // self.page_size), 1)
        # Kernels that read pages are told each row's length; those of the CPU get them gathered, and need none where all are alike. On a GPU
        # whole pages are shown, so that what is made for a shape (cuDNN's plans) is made anew for a page, not for a token.
        whole, shown = self._shown
        if whole is not table or shown.shape[1] != width:
            shown = table[:, :width]
            self._shown = (table, shown)
        pages = Pages(self.pool.keys, self.pool.values, shown, longest if there is None else None, first)
        if there is None and not (device.type == "cpu" and lengths and uniform(lengths)):
            there = on_device(lengths, device)
        # A mask covers the longest row, as `slots` says before the call.
        return Step(None, None, slots, there, pages, new, settled=new is None or new.counted is None or new.key.shape[1] == 1)

    def write(self, step: Step) -> None:
        new, pool, size = step.new, self.pool, self.page_size
        device = pool.keys.device
        if any(page not in pool.free for page in new.fresh):
            raise RuntimeError("cache: its pages changed between the check of this call and its run; one thread at a time")
        new.taken.extend(new.fresh)
        pool.take(new.fresh)
        if new.copies:
            source, target = torch.tensor(new.copies, device=device).T
            pool.keys[target], pool.values[target] = pool.keys[source], pool.values[source]
        self._enter(new.entries, new.table)
        if new.counted is None:
            self._write_by_torch(new, step.pages)
            return
        rows, n = new.key.shape[:2]
        counts = None if new.counts == [n] * rows else on_device(new.counts, device)
        if not append.in_one_launch(new.key, new.value, pool.keys, pool.values, new.counted, size, counts, table=new.table):
            self._write_by_torch(new, step.pages)
            new.counted.add_(n if counts is None else counts)

    def _write_by_torch(self, new: _New, pages: Pages) -> None:
        pool, size, tables, starts, counts = self.pool, self.page_size, new.tables, new.starts, new.counts
        if new.first is not None and uniform(starts) and uniform(counts):
            put(pages.gathered(pool.keys), new.key, starts, counts)
            put(pages.gathered(pool.values), new.value, starts, counts)
            return
        device = pool.keys.device
        slots = [(tables[b], n) for b, c in enumerate(counts) for n in range(starts[b], starts[b] + c)]
        places = torch.tensor([table[n // size] * size + n % size for table, n in slots], dtype=torch.long).to(device, non_blocking=True)
        for flat, tokens in zip(pool.flat, (new.key, new.value)):
            width = tokens.shape[1]
            if len(slots) == len(counts) * width:
                tokens = tokens.flatten(0, 1)
            else:
                taken = torch.tensor([b * width + i for b, c in enumerate(counts) for i in range(c)], dtype=torch.long)
                tokens = tokens.flatten(0, 1).index_select(0, taken.to(device, non_blocking=True))
            flat.index_copy_(0, places, tokens)

    def _enter(self, entries: Sequence[tuple[int, int, int]], table: torch.Tensor) -> None:
        if entries:
            row, column, page = torch.tensor(entries, dtype=torch.int32).to(table.device, non_blocking=True).T
            table[row, column] = page

    def commit(self, step: Step) -> None:
        new = step.new
        self.pool.release([source for source, _ in new.copies])
        if self._room[0] is self._lengths and new.key.shape[1] <= self._room[2] and uniform(new.counts):
            self._room = (new.after, self._room[1], self._room[2] - max(new.counts, default=0))
        self._tables, self._lengths, self._table, self._first, self._counted = new.tables, new.after, new.table, new.first, new.counted

    def undo(self, step: Step) -> None:
        new, self._counted = step.new, None
        self.pool.release([page for page in new.taken if self.pool.holders[page]])
        self._enter([(row, column, 0) for row, column, _ in new.entries], new.table)
        self._clear(self._tables, new.starts, new.after)

    def _clear(self, tables: list[list[int]], starts: Sequence[int], ends: Sequence[int]) -> None:
        """Zeros from `starts[b]` to `ends[b]` in the pages that row b alone holds."""
        for table, start, end in zip(tables, starts, ends):
            for index in range(start // self.page_size, min(-(-end // self.page_size), len(table))):
                page = table[index]
                if self.pool.holders[page] == 1:
                    low = max(start - index * self.page_size, 0)
                    self.pool.keys[page, low:].zero_()
                    self.pool.values[page, low:].zero_()

    def crop(self, lengths: Lengths) -> None:
        wanted = shorter(self._lengths, lengths)
        size = self.page_size
        cut = [b for b, n in enumerate(wanted) if n % size and n < self._lengths[b] and self.pool.holders[self._tables[b][n // size]] > 1]
        # A page that others hold too keeps its content for them; the row gets its own.
        for b, page in zip(cut, self.pool.take_any(len(cut))):
            old = self._tables[b][wanted[b] // size]
            self.pool.keys[page], self.pool.values[page] = self.pool.keys[old], self.pool.values[old]
            self.pool.release([old])
            self._tables[b][wanted[b] // size] = page
        for b, n in enumerate(wanted):
            keep = -(-n // size)
            self.pool.release(self._tables[b][keep:])
            self._tables[b] = self._tables[b][:keep]
        self._clear(self._tables, wanted, self._lengths)
        self._lengths, self._table, self._counted = wanted, None, None

    def reorder(self, indices: torch.Tensor) -> None:
        """Row b becomes what row `indices[b]` was, sharing its pages. No content is copied until one of them appends."""
        rows = known_rows("indices", indices, len(self._lengths))
        old = self._tables
        for r in rows:
            self.pool.hold(old[r])
        self._tables, self._lengths = [list(old[r]) for r in rows], [self._lengths[r] for r in rows]
        for table in old:
            self.pool.release(table)
        self._table = self._counted = None

    def share(self, source: int, target: int, length: int | None = None) -> None:
        """Gives the empty row `target` the first `length` tokens of row `source`: whole pages are shared, the last one is copied."""
        row_numbers([source, target], len(self._lengths))
        length = self._lengths[source] if length is None else whole_number("length", length)
        if self._lengths[target]:
            raise ValueError(f"target: an empty row, but row {target} has length {self._lengths[target]}; free it first")
        if length > self._lengths[source]:
            raise ValueError(f"length: between 0 and {self._lengths[source]}, the source's length, got {length}")
        whole, rest = divmod(length, self.page_size)
        last = self.pool.take_any(1 if rest else 0)
        for page in last:
            old = self._tables[source][whole]
            self.pool.keys[page, :rest], self.pool.values[page, :rest] = self.pool.keys[old, :rest], self.pool.values[old, :rest]
        shared = self._tables[source][:whole]
        self.pool.hold(shared)
        self._tables[target], self._lengths[target], self._room = shared + last, length, (None, 0, 0)
        self._table = self._counted = None

    def reset(self, rows: Sequence[int] | torch.Tensor | None = None) -> None:
        gone = set(row_numbers(rows, len(self._lengths)))
        self.crop([0 if b in gone else n for b, n in enumerate(self._lengths)])

    free = reset

    def fork(self) -> PagedLayer:
        """Shares this layer's pool and all its pages; whoever writes into a shared page copies it first."""
        return self._holding(self.pool, self._tables, self._lengths)

    def __reduce__(self) -> tuple:
        """For pickles and copies: the new layer holds its pages itself, and what shows them on the device is made anew."""
        return self._holding, (self.pool, self._tables, self._lengths)

    @classmethod
    def _holding(cls, pool: Pool, tables: list[list[int]], lengths: list[int]) -> PagedLayer:
        new = cls(pool, 0)
        new._tables, new._lengths = [list(table) for table in tables], list(lengths)
        for table in new._tables:
            pool.hold(table)
        return new

    def contents(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        table, first = self._tabled(self._tables)
        longest = max(self._lengths, default=0)
        pages = Pages(self.pool.keys, self.pool.values, table[:, : max(-(-longest // self.page_size), 1)], longest, first)
        return pages.gathered(pages.keys), pages.gathered(pages.values), self.lengths

    def restore(self, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor) -> None:
        check_new(key, value, self.pool.keys, self.pool.values, len(self._lengths))
        empty = PagedLayer(self.pool, len(self._lengths))
        needed = sum(-(-n // self.page_size) for n in lengths.tolist())
        own = sum(1 for table in self._tables for page in table if self.pool.holders[page] == 1)
        if needed > len(self.pool.free) + own:
            raise ValueError(f"cache: {needed} pages needed, {len(self.pool.free) + own} can be had; make a larger PagedCache")
        key, value = key.detach().clone(), value.detach().clone()  # they may be what this layer's `contents` showed
        self.reset()
        with torch.no_grad():
            step = empty.prepare(key, value, lengths.tolist(), None, None)
            empty.write(step)
        empty.commit(step)
        self._tables, self._lengths, self._table, self._counted = empty._tables, empty._lengths, None, None
        empty._tables = []


class PagedCache(Cache):
    """A pool of pages for all layers. A row holds only the pages that its length needs; `free(rows)` gives them back while others run.

    rows: how many requests there may be at a time; those that don't take part in a step have `query_lengths` 0.
    pages: pages in each layer's pool, one of zeros added. page_size: slots in a page; kernels that read pages themselves take some sizes
        only (flash-attn 2: multiples of 256), all others get them gathered.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        pages: int,
        page_size: int,
        key_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        layers, rows = whole_number("layers", layers, 1), whole_number("rows", rows)
        pages, page_size = whole_number("pages", pages, 1), whole_number("page_size", page_size, 1)
        key_heads, dims, like = storage_of(key_heads, head_dim, value_dim, dtype, device)
        pools = [Pool(*(zeros((pages + 1, page_size, key_heads, dim), like) for dim in dims)) for _ in range(layers)]
        super().__init__([PagedLayer(pool, rows) for pool in pools])
        self._allocated: set[int] = set()
        """Rows that were handed out and not freed since; they may be empty as yet."""

    @property
    def free_pages(self) -> int:
        return len(self.layer(0).pool.free)

    def allocate(self) -> int:
        """An empty row, which is the caller's until it is freed or reset. Raises ValueError when all are in use."""
        for row, length in enumerate(self.layer(0)._lengths):
            if length == 0 and row not in self._allocated:
                self._allocated.add(row)
                return row
        raise ValueError(f"cache: all {len(self.layer(0)._lengths)} rows are in use; free(rows) of finished requests")

    def free(self, rows: Sequence[int] | torch.Tensor | int) -> None:
        """Empties rows and gives their pages back."""
        self.reset(rows)

    def reset(self, rows: Sequence[int] | torch.Tensor | int | None = None) -> None:
        """Empties some rows, or all, and gives their pages back: `allocate` may hand them out again."""
        super().reset(rows)
        self._allocated.difference_update(row_numbers(rows, len(self.layer(0)._lengths)))

    def fork(self) -> PagedCache:
        new = super().fork()
        new._allocated = set(self._allocated)
        return new

    def share(self, source: int, target: int, length: int | None = None) -> None:
        """Gives the empty row `target` the first `length` tokens of row `source`, in the same pages: a prefix that requests share."""
        for layer in self.layers:
            layer.share(source, target, length)
