"""The cache that keeps only what a window can still see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..checks.numbers import whole_number
from .layers import Cache
from .protocol import (
    Lengths,
    Step,
    check_new,
    check_pair,
    clear,
    host_counts,
    host_numbers,
    known_rows,
    on_device,
    put,
    refuse_gradient,
    row_numbers,
    uniform,
    writable,
    zeros,
)


class SlidingLayer:
    """One layer: the last `keep` tokens of each row, in order, in storage (B, room, Hkv, D) that is begun anew when it is full.

    A row's tokens stand in slots `_starts[b]` to `_starts[b] + _held[b]` of the storage; it has seen `_lengths[b]` of them.
    """

    def __init__(self, left: int, keep: int) -> None:
        self.left, self.keep = left, keep
        self._key: torch.Tensor | None = None
        self._value: torch.Tensor | None = None
        self._lengths: list[int] = []
        self._starts: list[int] = []
        self._held: list[int] = []
        self.dropped_padding: torch.Tensor | None = None
        """(B,) how many of the dropped tokens were padding, as key masks said."""

    @property
    def lengths(self) -> torch.Tensor:
        return on_device(self._lengths, torch.device("cpu") if self._key is None else self._key.device)

    @property
    def dropped(self) -> list[int]:
        """How many tokens of each row are gone: slot j of a call is the row's token `dropped[b] + j`."""
        return [n - held for n, held in zip(self._lengths, self._held)]

    @property
    def held(self) -> torch.Tensor:
        """(B,) how many of its last tokens each row still has."""
        return torch.tensor(self._held, dtype=torch.int32)

    def slots(self, n_new: int) -> int:
        return max(self._held, default=0) + n_new

    def prepare(
        self, key: torch.Tensor | None, value: torch.Tensor | None, counts: Any, window: tuple | None, key_mask: torch.Tensor | None
    ) -> Step:
        if not isinstance(window, tuple) or window[0] is None or window[0] > self.left:
            raise ValueError(
                f"window: this cache keeps what (left, right) with left of at most {self.left} can see, got {window!r}; "
                "give that window, or use another cache"
            )
        if key is None:
            if self._key is None:
                raise ValueError("cache: nothing was appended yet, so key=None leaves nothing to say what the values' size is")
            keys, values, start = self._key, self._value, max(self._starts, default=0)
            if not uniform(self._starts):
                keys, values, start = self._moved(keys, self.slots(0)), self._moved(values, self.slots(0)), 0
            return self._step(keys, values, start, self._held, self.slots(0), None)
        refuse_gradient(key, value)
        rows = key.shape[0]
        if self._key is not None:
            check_new(key, value, self._key, self._value, len(self._lengths))
        held = self._held if self._key is not None else [0] * rows
        starts = self._starts if self._key is not None else [0] * rows
        counts = host_counts(counts, rows, key.shape[1])
        total = [h + c for h, c in zip(held, counts)]
        slots = max(held, default=0) + key.shape[1]
        longest = max(total, default=0)
        keys, values = self._key, self._value
        if keys is None or not uniform(starts) or (starts and starts[0] + longest > keys.shape[1]):
            # Room for as many decode steps as are kept: what is moved then is, for each of them, a constant.
            room = longest + self.keep + 16
            keys, values = zeros((rows, room, *key.shape[2:]), key), zeros((rows, room, *value.shape[2:]), value)
            starts = [0] * rows
        new = (keys, values, key, value, starts, held, counts, total, key_mask)
        return self._step(keys, values, starts[0] if starts else 0, total, slots, new)

    def _step(self, keys: torch.Tensor, values: torch.Tensor, start: int, total: list[int], slots: int, new: Any) -> Step:
        longest = max(total, default=0)
        ragged = None if not total or uniform(total) else on_device(total, keys.device)
        return Step(keys[:, start : start + longest], values[:, start : start + longest], slots, ragged, new=new)

    def _moved(self, old: torch.Tensor, room: int) -> torch.Tensor:
        """What each row holds, from slot 0 on, and zeros after it."""
        new = zeros((old.shape[0], room, *old.shape[2:]), old)
        for b, (start, held) in enumerate(zip(self._starts, self._held)):
            new[b, :held] = old[b, start : start + held]
        return new

    def write(self, step: Step) -> None:
        keys, values, key, value, starts, held, counts = step.new[:7]
        if keys is not self._key and self._key is not None:
            for old, new in ((self._key, keys), (self._value, values)):
                if uniform(self._starts) and uniform(held):
                    new[:, : held[0]] = old[:, self._starts[0] : self._starts[0] + held[0]]
                else:
                    new.copy_(self._moved(old, new.shape[1]))
        ends = [s + h for s, h in zip(starts, held)]
        put(keys, key, ends, counts)
        put(values, value, ends, counts)

    def commit(self, step: Step) -> None:
        keys, values, _, _, starts, _, counts, total, key_mask = step.new
        lengths = self._lengths if self._key is not None else [0] * len(total)
        keep = [min(t, self.keep) for t in total]
        dropped = [t - k for t, k in zip(total, keep)]
        if key_mask is not None and any(dropped):
            gone = torch.arange(key_mask.shape[1], device=key_mask.device)[None] < on_device(dropped, key_mask.device)[:, None]
            padded = (gone & ~key_mask).sum(1)
            self.dropped_padding = padded if self.dropped_padding is None else self.dropped_padding + padded
        self._key, self._value = keys, values
        self._lengths = [n + c for n, c in zip(lengths, counts)]
        self._starts, self._held = [s + d for s, d in zip(starts, dropped)], keep

    def undo(self, step: Step) -> None:
        keys, values, _, _, starts, held, _, total, _ = step.new
        if keys is self._key:
            begin, end = [s + h for s, h in zip(starts, held)], [s + t for s, t in zip(starts, total)]
            clear(keys, begin, end)
            clear(values, begin, end)

    def crop(self, lengths: Lengths) -> None:
        """Raises ValueError where a later window would see tokens that are gone: keep more, by `rollback`."""
        wanted = host_numbers("lengths", lengths, len(self._lengths))
        held = []
        for b, (n, length, have) in enumerate(zip(wanted, self._lengths, self._held)):
            if not 0 <= n <= length:
                raise ValueError(f"lengths: each between 0 and the row's length, {self._lengths}, got {wanted}")
            left = have - (length - n)
            if n and n < length and left < min(n, self.left + 1):
                raise ValueError(
                    f"lengths: row {b} of length {length} keeps its last {have} tokens, and cropped to {n} would lack some that its window of "
                    f"{self.left} sees; SlidingCache(..., rollback={length - n}) keeps as many more"
                )
            held.append(max(left, 0) if n else 0)
        if not wanted:
            return
        begin, end = [s + h for s, h in zip(self._starts, held)], [s + h for s, h in zip(self._starts, self._held)]
        clear(self._key, begin, end)
        clear(self._value, begin, end)
        if self.dropped_padding is not None:
            gone = torch.tensor([n == 0 for n in wanted], device=self.dropped_padding.device)
            self.dropped_padding = self.dropped_padding.masked_fill(gone, 0)
        self._lengths, self._held = wanted, held

    def reorder(self, indices: torch.Tensor) -> None:
        """Row b becomes what row `indices[b]` was; another number of indices makes another batch size."""
        rows = known_rows("indices", indices, len(self._lengths))
        if self._key is None:
            return
        index = torch.tensor(rows, dtype=torch.long, device=self._key.device)
        with writable():
            self._key, self._value = self._key.index_select(0, index), self._value.index_select(0, index)
        if self.dropped_padding is not None:
            self.dropped_padding = self.dropped_padding.index_select(0, index.to(self.dropped_padding.device))
        self._lengths, self._starts, self._held = ([n[r] for r in rows] for n in (self._lengths, self._starts, self._held))

    def reset(self, rows: Sequence[int] | torch.Tensor | None = None) -> None:
        gone = set(row_numbers(rows, len(self._lengths)))
        self.crop([0 if b in gone else n for b, n in enumerate(self._lengths)])

    def fork(self) -> SlidingLayer:
        new = SlidingLayer(self.left, self.keep)
        new.__dict__.update(self.__dict__)
        if self._key is not None:
            with writable():
                new._key, new._value = self._key.clone(), self._value.clone()
        return new

    def contents(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What is held, from each row's own start, and the lengths seen."""
        if self._key is None:
            raise ValueError("cache: nothing was appended yet")
        longest = max(self._held, default=0)
        return self._moved(self._key, longest), self._moved(self._value, longest), self.lengths

    def restore(self, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor, held: torch.Tensor | None = None) -> None:
        """`held`: how many of a row's tokens stand in key and value, from slot 0 on; by default as many as there can be."""
        check_pair(key, value)
        have = self.held_in(key, lengths, held)
        self._held = [min(n, self.keep) for n in have]
        self._starts = first = [n - kept for n, kept in zip(have, self._held)]
        self._lengths = lengths.tolist()
        with writable():
            self._key, self._value = key.clone(), value.clone()
        clear(self._key, [0] * len(first), first)
        clear(self._value, [0] * len(first), first)
        self.dropped_padding = None

    def held_in(self, key: torch.Tensor, lengths: torch.Tensor, held: torch.Tensor | None) -> list[int]:
        """What `restore` would find of each row. Raises ValueError where the window would see tokens that are not there."""
        seen = lengths.tolist()
        have = [min(n, key.shape[1]) for n in seen] if held is None else held.tolist()
        if any(not 0 <= there <= min(n, key.shape[1]) for n, there in zip(seen, have)):
            raise ValueError(f"held: each between 0 and the row's length, {seen}, and {key.shape[1]}, the slots given, got {have}")
        for b, (n, there) in enumerate(zip(seen, have)):
            if there < min(n, self.left + 1):
                raise ValueError(
                    f"held: row {b} of length {n} has its last {there} tokens, and lacks some that the window of {self.left} sees; "
                    "a cache can be restored with the window that it was saved with, or a narrower one"
                )
        return have


class SlidingCache(Cache):
    """A cache for layers whose `window` is (left, ...) with left of at most `left`: it keeps that many
    tokens of each row and the last one, at which a call without new tokens looks from.

    layers: how many. rollback: how many more tokens are kept, so that `crop` can take back that many.
    Slots of a call are what is kept and the new tokens; distances and `positions` are true all the same.
    """

    def __init__(self, layers: int, left: int, rollback: int = 0) -> None:
        layers, left, rollback = whole_number("layers", layers, 1), whole_number("left", left), whole_number("rollback", rollback)
        super().__init__([SlidingLayer(left, left + 1 + rollback) for _ in range(layers)])
