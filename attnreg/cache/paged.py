"""The cache in pages: rows of any length share one pool, come and go while others run, and may share a prefix.

A layer has its own pool and table; all layers of a cache are asked for the same, and so stay alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .layers import Cache
from .protocol import (
    Lengths,
    Pages,
    Step,
    check_new,
    host_counts,
    on_device,
    places,
    refuse_gradient,
    row_numbers,
    shorter,
    zeros,
)


class Pool:
    """Pages of one layer, counted by how many rows hold each. Page 0 is never given out and stays zero: it fills the tables' gaps."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values
        self.holders = [0] * keys.shape[0]
        self.free = list(range(keys.shape[0] - 1, 0, -1))

    def take(self, count: int) -> list[int]:
        """Pages of zeros. Raises ValueError, and takes none, when there are too few."""
        if count > len(self.free):
            raise ValueError(
                f"cache: {count} new pages needed, {len(self.free)} of {len(self.holders) - 1} are free; free(rows) of finished requests, "
                "or make a larger PagedCache"
            )
        taken = [self.free.pop() for _ in range(count)]
        for page in taken:
            self.holders[page] = 1
        if taken:
            index = torch.tensor(taken, device=self.keys.device)
            self.keys.index_fill_(0, index, 0.0)
            self.values.index_fill_(0, index, 0.0)
        return taken

    def hold(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                self.free.append(page)


class PagedLayer:
    """One layer: a pool of pages (pages, page_size, Hkv, D), and for each row a list of the pages that it holds."""

    def __init__(self, pool: Pool, rows: int) -> None:
        self.pool = pool
        self._tables: list[list[int]] = [[] for _ in range(rows)]
        self._lengths = [0] * rows
        self._table_on_device: torch.Tensor | None = None

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
        starts, pool, size = self._lengths, self.pool, self.page_size
        if key is None:
            return self._step(self._tables, starts, None, max(starts, default=0))
        check_new(key, value, pool.keys, pool.values, len(starts))
        refuse_gradient(key, value)
        counts = host_counts(counts, len(starts), key.shape[1])
        after = [n + c for n, c in zip(starts, counts)]
        # Which pages will be used is known before they are taken: explain() must not take any. A page that others hold too is copied
        # before a row writes into it.
        tables, fresh, copies = [list(t) for t in self._tables], [], []
        free = iter(reversed(pool.free))
        short = 0
        for b, (start, end) in enumerate(zip(starts, after)):
            if end == start:
                continue
            for index in range(start // size, -(-end // size)):
                shared = index < len(tables[b])
                if shared and pool.holders[tables[b][index]] == 1:
                    continue
                page = next(free, None)
                if page is None:
                    short += 1
                    continue
                fresh.append(page)
                if shared:
                    copies.append((tables[b][index], page))
                    tables[b][index] = page
                else:
                    tables[b].append(page)
        if short:
            raise ValueError(
                f"cache: {len(fresh) + short} new pages of {size} slots needed, {len(fresh)} of {len(pool.holders) - 1} are free; "
                "free(rows) of finished requests, or make a larger PagedCache"
            )
        return self._step(tables, after, (key, value, tables, after, starts, counts, fresh, copies), max(starts, default=0) + key.shape[1])

    def _step(self, tables: list[list[int]], lengths: list[int], new: Any, slots: int) -> Step:
        same = new is None or not new[6]
        if same and self._table_on_device is not None:
            table = self._table_on_device
        else:
            widest = max(max(map(len, tables), default=0), 1)
            table = on_device([t + [0] * (widest - len(t)) for t in tables], self.pool.keys.device).reshape(len(tables), widest)
        pages = Pages(self.pool.keys, self.pool.values, table)
        # A mask covers the longest row, as `slots` says before the call.
        return Step(None, None, slots, on_device(lengths, self.pool.keys.device), pages, new)

    def write(self, step: Step) -> None:
        key, value, tables, _, starts, counts, fresh, copies = step.new
        pool, size = self.pool, self.page_size
        device = pool.keys.device
        if pool.take(len(fresh)) != fresh:
            raise RuntimeError("cache: its pages changed between the check of this call and its run; one thread at a time")
        if copies:
            source, target = torch.tensor(copies, device=device).T
            pool.keys[target], pool.values[target] = pool.keys[source], pool.values[source]
        rows, slot, number = places(starts, counts, torch.device("cpu"))
        page = torch.tensor([tables[b][s // size] for b, s in zip(rows.tolist(), slot.tolist())], dtype=torch.long)
        page, offset, rows, number = torch.stack([page, slot % size, rows, number]).to(device, non_blocking=True)
        pool.keys[page, offset], pool.values[page, offset] = key[rows, number], value[rows, number]

    def commit(self, step: Step) -> None:
        tables, after, copies = step.new[2], step.new[3], step.new[7]
        self.pool.release([source for source, _ in copies])
        self._tables, self._lengths = tables, after
        self._table_on_device = step.pages.block_table

    def undo(self, step: Step) -> None:
        after, starts, fresh = step.new[3], step.new[4], step.new[6]
        # In the order in which they were taken, so that the free list is what it was.
        self.pool.release([page for page in reversed(fresh) if self.pool.holders[page]])
        self._clear(self._tables, starts, after)

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
        for b, page in zip(cut, self.pool.take(len(cut))):
            old = self._tables[b][wanted[b] // size]
            self.pool.keys[page], self.pool.values[page] = self.pool.keys[old], self.pool.values[old]
            self.pool.release([old])
            self._tables[b][wanted[b] // size] = page
        for b, n in enumerate(wanted):
            keep = -(-n // size)
            self.pool.release(self._tables[b][keep:])
            self._tables[b] = self._tables[b][:keep]
        self._clear(self._tables, wanted, self._lengths)
        self._lengths, self._table_on_device = wanted, None

    def reorder(self, indices: torch.Tensor) -> None:
        """Row b becomes what row `indices[b]` was, sharing its pages. No content is copied until one of them appends."""
        rows = row_numbers(indices, len(self._lengths))
        old = self._tables
        for r in rows:
            self.pool.hold(old[r])
        self._tables, self._lengths = [list(old[r]) for r in rows], [self._lengths[r] for r in rows]
        for table in old:
            self.pool.release(table)
        self._table_on_device = None

    def share(self, source: int, target: int, length: int | None = None) -> None:
        """Gives the empty row `target` the first `length` tokens of row `source`: whole pages are shared, the last one is copied."""
        row_numbers([source, target], len(self._lengths))
        length = self._lengths[source] if length is None else length
        if self._lengths[target]:
            raise ValueError(f"target: an empty row, but row {target} has length {self._lengths[target]}; free it first")
        if not 0 <= length <= self._lengths[source]:
            raise ValueError(f"length: between 0 and {self._lengths[source]}, the source's length, got {length}")
        whole, rest = divmod(length, self.page_size)
        last = self.pool.take(1 if rest else 0)
        for page in last:
            old = self._tables[source][whole]
            self.pool.keys[page, :rest], self.pool.values[page, :rest] = self.pool.keys[old, :rest], self.pool.values[old, :rest]
        shared = self._tables[source][:whole]
        self.pool.hold(shared)
        self._tables[target], self._lengths[target], self._table_on_device = shared + last, length, None

    def reset(self, rows: Sequence[int] | torch.Tensor | None = None) -> None:
        gone = set(row_numbers(rows, len(self._lengths)))
        self.crop([0 if b in gone else n for b, n in enumerate(self._lengths)])

    free = reset

    def fork(self) -> PagedLayer:
        """Shares this layer's pool and all its pages; whoever writes into a shared page copies it first."""
        new = PagedLayer(self.pool, 0)
        new._tables, new._lengths = [list(t) for t in self._tables], list(self._lengths)
        for table in new._tables:
            self.pool.hold(table)
        return new

    def contents(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        longest = max(self._lengths, default=0)
        table = self._step(self._tables, self._lengths, None, 0).pages.block_table.long()
        key, value = (pool[table].flatten(1, 2)[:, :longest] for pool in (self.pool.keys, self.pool.values))
        return key, value, self.lengths

    def restore(self, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor) -> None:
        check_new(key, value, self.pool.keys, self.pool.values, len(self._lengths))
        empty = PagedLayer(self.pool, len(self._lengths))
        needed = sum(-(-n // self.page_size) for n in lengths.tolist())
        own = sum(1 for table in self._tables for page in table if self.pool.holders[page] == 1)
        if needed > len(self.pool.free) + own:
            raise ValueError(f"cache: {needed} pages needed, {len(self.pool.free) + own} can be had; make a larger PagedCache")
        self.reset()
        with torch.no_grad():
            step = empty.prepare(key.detach(), value.detach(), lengths.tolist(), None, None)
            empty.write(step)
        empty.commit(step)
        self._tables, self._lengths, self._table_on_device = empty._tables, empty._lengths, None
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
        if pages < 1 or page_size < 1:
            raise ValueError(f"pages, page_size: at least 1 each, got {pages} and {page_size}")
        like = torch.empty(0, dtype=dtype, device=device)
        dims = (head_dim, head_dim if value_dim is None else value_dim)
        pools = [Pool(*(zeros((pages + 1, page_size, key_heads, dim), like) for dim in dims)) for _ in range(layers)]
        super().__init__([PagedLayer(pool, rows) for pool in pools])

    @property
    def free_pages(self) -> int:
        return len(self.layer(0).pool.free)

    def allocate(self) -> int:
        """A row that is not in use. Raises ValueError when all are."""
        for row, length in enumerate(self.layer(0)._lengths):
            if length == 0:
                return row
        raise ValueError(f"cache: all {len(self.layer(0)._lengths)} rows are in use; free(rows) of finished requests")

    def free(self, rows: Sequence[int] | torch.Tensor | int) -> None:
        """Empties rows and gives their pages back."""
        self._every("reset", rows)

    def share(self, source: int, target: int, length: int | None = None) -> None:
        """Gives the empty row `target` the first `length` tokens of row `source`, in the same pages: a prefix that requests share."""
        for layer in self.layers:
            layer.share(source, target, length)
