"""The cache that grows: appending one token costs, on average, a constant."""

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
    known_rows,
    on_device,
    places,
    put,
    row_numbers,
    shorter,
    uniform,
    writable,
    zeros,
)


class DynamicLayer:
    """One layer. Its storage is (B, room, Hkv, D); a quarter is added when it is full, so a token is copied about four times in all.

    The only cache that takes keys that require grad: those are appended out of place, so that earlier steps keep their graphs.
    """

    def __init__(self) -> None:
        self._key: torch.Tensor | None = None
        self._value: torch.Tensor | None = None
        self._lengths: list[int] = []
        self._lent = False
        """Key and value are the caller's own, from `restore`: nothing may be written into them."""

    @property
    def lengths(self) -> torch.Tensor:
        return on_device(self._lengths, torch.device("cpu") if self._key is None else self._key.device)

    def slots(self, n_new: int) -> int:
        return max(self._lengths, default=0) + n_new

    def prepare(
        self, key: torch.Tensor | None, value: torch.Tensor | None, counts: Any, window: tuple | None, key_mask: torch.Tensor | None
    ) -> Step:
        if key is None:
            if self._key is None:
                raise ValueError("cache: nothing was appended yet, so key=None leaves nothing to say what the values' size is")
            return self._step(self._key, self._value, self._lengths, None, self.slots(0))
        if self._key is None:
            starts = [0] * key.shape[0]
        else:
            check_new(key, value, self._key, self._value, len(self._lengths))
            starts = self._lengths
        counts = host_counts(counts, len(starts), key.shape[1])
        after = [start + count for start, count in zip(starts, counts)]
        longest, keys, values = max(after, default=0), self._key, self._value
        slots = max(starts, default=0) + key.shape[1]
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (key, value, keys, values)):
            keys, values = (_appended(old, new, starts, counts, longest) for old, new in ((keys, key), (values, value)))
            return self._step(keys, values, after, (None, None, starts, counts), slots)
        # What requires grad may stand in the graph of an earlier step, without gradients too: it is left as it is.
        if keys is None or longest > keys.shape[1] or self._lent or keys.requires_grad or values.requires_grad:
            room = longest + longest // 4 + 16
            keys, values = zeros((len(starts), room, *key.shape[2:]), key), zeros((len(starts), room, *value.shape[2:]), value)
        return self._step(keys, values, after, (key, value, starts, counts), slots)

    def _step(self, keys: torch.Tensor, values: torch.Tensor, lengths: list[int], new: Any, slots: int) -> Step:
        longest = max(lengths, default=0)
        ragged = None if not lengths or uniform(lengths) else on_device(lengths, keys.device)
        return Step(keys[:, :longest], values[:, :longest], slots, ragged, new=None if new is None else (keys, values, lengths, *new))

    def write(self, step: Step) -> None:
        keys, values, _, key, value, starts, counts = step.new
        if key is None:
            return
        if keys is not self._key and self._key is not None:
            past = max(starts, default=0)
            keys[:, :past], values[:, :past] = self._key[:, :past], self._value[:, :past]
        put(keys, key, starts, counts)
        put(values, value, starts, counts)

    def commit(self, step: Step) -> None:
        self._key, self._value, self._lengths = step.new[:3]
        self._lent = False

    def undo(self, step: Step) -> None:
        keys, values, after, key, _, starts, _ = step.new
        if key is not None and keys is self._key:
            clear(keys, starts, after)
            clear(values, starts, after)

    def crop(self, lengths: Lengths) -> None:
        lengths = shorter(self._lengths, lengths)
        if lengths == self._lengths:
            return
        if self._lent:
            with writable():
                self._key, self._value, self._lent = self._key.clone(), self._value.clone(), False
        if self._key.requires_grad or self._value.requires_grad:
            self._key, self._value = self._key[:, : max(lengths)], self._value[:, : max(lengths)]
            if not uniform(lengths):
                gone = (torch.arange(max(lengths), device=self._key.device)[None] >= on_device(lengths, self._key.device)[:, None])[
                    ..., None, None
                ]
                self._key, self._value = self._key.masked_fill(gone, 0.0), self._value.masked_fill(gone, 0.0)
        else:
            clear(self._key, lengths, self._lengths)
            clear(self._value, lengths, self._lengths)
        self._lengths = lengths

    def reorder(self, indices: torch.Tensor) -> None:
        """Row b becomes what row `indices[b]` was; another number of indices makes another batch size."""
        rows = known_rows("indices", indices, len(self._lengths))
        if self._key is None:
            return
        index = torch.tensor(rows, dtype=torch.long, device=self._key.device)
        with writable():
            self._key, self._value = self._key.index_select(0, index), self._value.index_select(0, index)
        self._lent = False
        self._lengths = [self._lengths[r] for r in rows]

    def reset(self, rows: Sequence[int] | torch.Tensor | None = None) -> None:
        gone = set(row_numbers(rows, len(self._lengths)))
        self.crop([0 if b in gone else n for b, n in enumerate(self._lengths)])

    def fork(self) -> DynamicLayer:
        new = DynamicLayer()
        if self._key is not None:
            with writable():
                new._key, new._value = self._key.clone(), self._value.clone()
        new._lengths = list(self._lengths)
        return new

    def contents(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._key is None:
            raise ValueError("cache: nothing was appended yet")
        longest = max(self._lengths, default=0)
        return self._key[:, :longest], self._value[:, :longest], self.lengths

    def restore(self, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor) -> None:
        check_pair(key, value)
        # Taken as they are, without a copy: the next change makes its own. Only what stands past a row's end is cleaned, in a copy.
        self._key, self._value, self._lengths, self._lent = key, value, lengths.tolist(), True
        if not uniform(self._lengths or [0]):
            gone = torch.arange(key.shape[1], device=key.device)[None] >= lengths.to(key.device)[:, None]
            with writable():
                self._key, self._value = (tensor.masked_fill(gone[..., None, None], 0.0) for tensor in (key, value))
            self._lent = False


def _appended(old: torch.Tensor | None, new: torch.Tensor, starts: list[int], counts: list[int], slots: int) -> torch.Tensor:
    """Past and new as a new tensor, with gradients into both."""
    past = max(starts, default=0)
    if uniform(starts) and uniform(counts):
        new = new[:, : counts[0]]
        return new if old is None else torch.cat([old[:, :past], new], 1)
    rows, slot, number = places(starts, counts, new.device)
    whole = new.new_zeros((new.shape[0], slots, *new.shape[2:]))
    if old is not None:
        whole = torch.cat([old[:, :past], whole[:, past:]], 1)
    return whole.index_put((rows, slot), new[rows, number])


class DynamicCache(Cache):
    """A cache for all layers of a model that needs to know nothing beforehand: layers are made as they are asked for.

    layers: how many there are, where that should be checked; by default as many as are used.
    """

    def __init__(self, layers: int | None = None) -> None:
        self._fixed = layers is not None
        super().__init__([DynamicLayer() for _ in range(whole_number("layers", layers, 1) if self._fixed else 0)])

    def layer(self, index: int) -> DynamicLayer:
        if not self._fixed:
            self.layers.extend(DynamicLayer() for _ in range(len(self.layers), whole_number("layer", index, None) + 1))
        return super().layer(index)
