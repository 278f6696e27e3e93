"""The cache of fixed size: allocated once, lengths on the device, no host sync and no change of shapes from step to step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..checks.numbers import whole_number, whole_tensor
from .append import FEW, in_one_launch
from .layers import Cache
from .protocol import (
    Lengths,
    Step,
    check_new,
    clear,
    host_counts,
    known_rows,
    put,
    refuse_gradient,
    row_numbers,
    shorter,
    storage_of,
    uniform,
    zeros,
)


def lengths_at_hand(device: torch.device) -> bool:
    """Whether the host may look at lengths without waiting for a device, or breaking a graph."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


class _InPlace(NamedTuple):
    """How many tokens a step adds to the lengths that its kernels read."""

    counts: torch.Tensor | None
    """(B,) int32; None where every row appends all of them."""
    done: list[int]
    """Empty until they are counted."""


class StaticLayer:
    """One layer: (B, capacity, Hkv, D), and `lengths` (B,) int32 on the device.

    On a CPU outside of compiled regions lengths are at hand: an append past the capacity is a ValueError, and kernels are given the used
    part only. Elsewhere a row that does not fit appends nothing, and `overflowed` is set. Each row has one spare slot past its capacity
    that no kernel is shown: a token that does not fit lands there, so that appending one token asks the device no question.
    """

    def __init__(self, rows: int, capacity: int, key_heads: int, dims: tuple[int, int], like: torch.Tensor) -> None:
        self._set_rooms(tuple(zeros((rows, capacity + 1, key_heads, dim), like) for dim in dims))
        with torch.inference_mode(False):
            self.lengths = torch.zeros(rows, dtype=torch.int32, device=like.device)
            self._asked = torch.zeros(rows, dtype=torch.int32, device=like.device)
            """Lengths as they would be without a capacity: what is past it has overflowed."""
            self._first = torch.arange(rows, device=like.device) * (capacity + 1)
            """Where each row begins in `_flat`."""
            self._overflowed = torch.zeros(rows, dtype=torch.bool, device=like.device)
            """Rows that have lost a token since they were last empty."""

    def _set_rooms(self, rooms: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._rooms, self._flat = rooms, tuple(room.flatten(0, 1) for room in rooms)
        self.key, self.value = (room[:, :-1] for room in rooms)

    @property
    def capacity(self) -> int:
        return self.key.shape[1]

    @property
    def overflowed(self) -> torch.Tensor:
        return (self._overflowed | (self._asked > self.capacity)).any()

    def slots(self, n_new: int) -> int:
        return self.capacity

    def prepare(
        self, key: torch.Tensor | None, value: torch.Tensor | None, counts: Any, window: tuple | None, key_mask: torch.Tensor | None
    ) -> Step:
        if key is not None:
            check_new(key, value, self.key, self.value, self.key.shape[0])
            refuse_gradient(key, value)
            if key.shape[1] > self.capacity:
                raise ValueError(f"key: at most {self.capacity} tokens, the cache's capacity, got {key.shape[1]}")
        if lengths_at_hand(self.key.device):
            return self._known_step(key, value, counts)
        if key is None:
            return Step(self.key, self.value, self.capacity, self.lengths)
        new = key.shape[1]
        if counts is not None:
            counts = torch.as_tensor(counts, dtype=torch.int32).to(self.lengths.device, non_blocking=True)
        if (new == 1 and counts is None) or (new <= FEW and key_mask is None):
            # The lengths are those after the call: `write` sets them in place before a kernel reads them. What a key mask of several tokens
            # means for the choice is asked before that, and so they are computed beforehand.
            in_place = (key, value, _InPlace(counts, []))
            return Step(self.key, self.value, self.capacity, self.lengths, new=in_place, settled=new == 1)
        after = self.lengths + (new if counts is None else counts.clamp(0, new))
        fits = after <= self.capacity
        after = torch.where(fits, after, self.lengths)
        return Step(self.key, self.value, self.capacity, after, new=(key, value, after, fits))

    def _known_step(self, key: torch.Tensor | None, value: torch.Tensor | None, counts: Any) -> Step:
        starts = after = self.lengths.tolist()
        new = None
        if key is not None:
            counts = host_counts(counts, len(starts), key.shape[1])
            after = [n + c for n, c in zip(starts, counts)]
            if max(after, default=0) > self.capacity:
                raise ValueError(
                    f"cache: capacity {self.capacity}, length {max(starts)}, {max(counts)} new: no room; "
                    "crop or reset rows, or make a larger StaticCache"
                )
            new = (key, value, after, starts, counts)
        longest = max(after, default=0)
        ragged = None if not after or uniform(after) else torch.tensor(after, dtype=torch.int32, device="cpu")
        return Step(self.key[:, :longest], self.value[:, :longest], self.capacity, ragged, new=new)

    def write(self, step: Step) -> None:
        key, value, *rest = step.new
        if len(rest) == 3:
            put(self.key, key, *rest[1:])
            put(self.value, value, *rest[1:])
        elif len(rest) == 2:
            self._write_where_it_fits(key, value, rest[0])
        else:
            counts, done = rest[0]
            if not in_one_launch(key, value, *self._rooms, self.lengths, self.capacity, counts, self._asked):
                self._write_in_place(key, value, counts)
            done.append(key.shape[1])

    def _write_in_place(self, key: torch.Tensor, value: torch.Tensor, counts: torch.Tensor | None) -> None:
        """What `in_one_launch` does, by torch's operations; what does not fit lands in the spare slot."""
        if key.shape[1] == 1 and counts is None:
            place = self._first + self.lengths
            for flat, new in zip(self._flat, (key, value)):
                flat.index_copy_(0, place, new.squeeze(1))
            self._asked.add_(1)
            torch.clamp(self._asked, max=self.capacity, out=self.lengths)
            return
        asked = self._asked + (key.shape[1] if counts is None else counts.clamp(0, key.shape[1]))
        after = torch.where(asked <= self.capacity, asked, self.lengths)
        self._write_where_it_fits(key, value, after)
        self._asked.copy_(asked)
        self.lengths.copy_(after)

    def _write_where_it_fits(self, key: torch.Tensor, value: torch.Tensor, after: torch.Tensor) -> None:
        number = torch.arange(key.shape[1], device=self.key.device)
        slot = self.lengths[:, None] + number
        place = self._first[:, None] + torch.where(slot < after[:, None], slot, self.capacity)
        for flat, new in zip(self._flat, (key, value)):
            flat.index_copy_(0, place.flatten(), new.flatten(0, 1))

    def _hold(self, lengths: torch.Tensor) -> None:
        """Sets the lengths, with what follows from them."""
        self._overflowed.logical_or_(self._asked > self.capacity)
        self.lengths.copy_(lengths)
        self._asked.copy_(lengths)

    def commit(self, step: Step) -> None:
        rest = step.new[2:]
        if len(rest) == 3 and uniform(rest[2]):
            self.lengths.add_(rest[2][0])
            self._asked.add_(rest[2][0])
        elif len(rest) == 3:
            self._hold(torch.tensor(rest[0], dtype=torch.int32, device="cpu"))
        elif len(rest) == 2:
            self._hold(rest[0])
            self._overflowed.logical_or_(~rest[1])
        elif step.new[0].shape[1] > 1:
            # After one token, lengths are what was asked for, up to the capacity. A row that had no room for several has kept its own.
            self._hold(self.lengths)

    def undo(self, step: Step) -> None:
        rest = step.new[2:]
        if len(rest) == 3:
            clear(self.key, rest[1], rest[0])
            clear(self.value, rest[1], rest[0])
            return
        if len(rest) == 1 and rest[0].done:
            new, counts = rest[0].done[0], rest[0].counts
            torch.clamp(self._asked.sub_(new if counts is None else counts.clamp(0, new)), max=self.capacity, out=self.lengths)
        self._keep(self.lengths)

    def crop(self, lengths: Lengths) -> None:
        if self.key.device.type == "cpu" or not isinstance(lengths, torch.Tensor):
            wanted = torch.tensor(shorter(self.lengths.tolist(), lengths), dtype=torch.int32, device=self.key.device)
        else:
            wanted = torch.minimum(self.lengths, whole_tensor("lengths", lengths).to(self.lengths).clamp_min(0))
        self._keep(wanted)

    def _keep(self, wanted: torch.Tensor) -> None:
        """Zeros past `wanted` in each row, the spare slot included."""
        gone = torch.arange(self.capacity + 1, device=self.key.device)[None] >= wanted[:, None]
        for room in self._rooms:
            room.masked_fill_(gone[..., None, None], 0.0)
        self._hold(wanted)

    def reorder(self, indices: torch.Tensor) -> None:
        """Row b becomes what row `indices[b]` was, in place: the batch size stays."""
        there = torch.is_tensor(indices) and indices.device.type != "cpu"
        rows = whole_tensor("indices", indices) if there else known_rows("indices", indices, self.key.shape[0])
        index = torch.as_tensor(rows, device=self.key.device)
        if index.shape != (self.key.shape[0],):
            raise ValueError(f"indices: one for each of the {self.key.shape[0]} rows, got shape {tuple(index.shape)}")
        for buffer in (self.key, self.value):
            buffer.copy_(buffer.index_select(0, index))
        self._hold(self.lengths.index_select(0, index))
        self._overflowed.copy_(self._overflowed.index_select(0, index))

    def reset(self, rows: Sequence[int] | torch.Tensor | None = None) -> None:
        if rows is None:
            for room in self._rooms:
                room.zero_()
            self._hold(torch.zeros_like(self.lengths))
            self._overflowed.zero_()
            return
        index = torch.tensor(row_numbers(rows, self.key.shape[0]), device=self.key.device)
        for room in self._rooms:
            room.index_fill_(0, index, 0)
        self._hold(self.lengths.index_fill(0, index, 0))
        self._overflowed.index_fill_(0, index, False)

    def fork(self) -> StaticLayer:
        with torch.inference_mode(False):
            return copy.deepcopy(self)

    def __getstate__(self) -> dict[str, Any]:
        """For pickles and copies, less the views of the rooms: they would be given memory of their own."""
        return {name: given for name, given in self.__dict__.items() if name not in ("_flat", "key", "value")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_rooms(self._rooms)

    def contents(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        longest = int(self.lengths.max()) if self.key.shape[0] else 0
        return self.key[:, :longest], self.value[:, :longest], self.lengths.clone()

    def restore(self, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor) -> None:
        check_new(key, value, self.key, self.value, self.key.shape[0])
        if key.shape[1] > self.capacity:
            raise ValueError(f"key: at most {self.capacity} slots, the cache's capacity, got {key.shape[1]}")
        key, value, lengths = key.clone(), value.clone(), lengths.clone()  # they may be what this layer's `contents` showed
        self.reset()
        self.key[:, : key.shape[1]], self.value[:, : value.shape[1]] = key, value
        self._hold(lengths)


class StaticCache(Cache):
    """A cache of fixed size for all layers: decode steps compile once, and can be captured into a CUDA graph.

    A mask over it covers its whole capacity. Bytes: 2 * layers * batch * (capacity + 1) * key_heads * head_dim * the dtype's
    size.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        capacity: int,
        key_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        layers, batch, capacity = whole_number("layers", layers, 1), whole_number("batch", batch), whole_number("capacity", capacity, 1)
        sizes = storage_of(key_heads, head_dim, value_dim, dtype, device)
        super().__init__([StaticLayer(batch, capacity, *sizes) for _ in range(layers)])

    @property
    def overflowed(self) -> torch.Tensor:
        """Whether an append went past the capacity, and was left out, where the host could not know: a bool on the device."""
        return torch.stack([layer.overflowed for layer in self.layers]).any()
