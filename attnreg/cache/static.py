"""The cache of fixed size: allocated once, lengths on the device, no host sync and no change of shapes from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .layers import Cache
from .protocol import Lengths, Step, check_new, clear, host_counts, put, refuse_gradient, row_numbers, shorter, uniform


class StaticLayer:
    """One layer: (B, capacity, Hkv, D), and `lengths` (B,) int32 on the device.

    On a CPU outside of compiled regions lengths are at hand: an append past the capacity is a ValueError, and kernels are given the used
    part only. Elsewhere a row that does not fit appends nothing, and `overflowed` is set.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self.key, self.value = key, value
        with torch.inference_mode(False):
            self.lengths = torch.zeros(key.shape[0], dtype=torch.int32, device=key.device)
            self.overflowed = torch.zeros((), dtype=torch.bool, device=key.device)

    @property
    def capacity(self) -> int:
        return self.key.shape[1]

    def slots(self, n_new: int) -> int:
        return self.capacity

    def prepare(
        self, key: torch.Tensor | None, value: torch.Tensor | None, counts: Any, window: tuple | None, key_mask: torch.Tensor | None
    ) -> Step:
        known = self.key.device.type == "cpu" and not torch.compiler.is_compiling()
        if key is not None:
            check_new(key, value, self.key, self.value, self.key.shape[0])
            refuse_gradient(key, value)
            if key.shape[1] > self.capacity:
                raise ValueError(f"key: at most {self.capacity} tokens, the cache's capacity, got {key.shape[1]}")
        if known:
            return self._known_step(key, value, counts)
        if key is None:
            return Step(self.key, self.value, self.capacity, self.lengths)
        new = key.shape[1]
        lengths = self.lengths
        if counts is not None and not isinstance(counts, torch.Tensor):
            counts = torch.tensor(counts, dtype=torch.int32, device=lengths.device)
        more = new if counts is None else counts.clamp(0, new).to(torch.int32)
        after = lengths + more
        fits = after <= self.capacity
        after = torch.where(fits, after, lengths)
        return Step(self.key, self.value, self.capacity, after, new=(key, value, after, more, fits))

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
        ragged = None if not after or uniform(after) else torch.tensor(after, dtype=torch.int32)
        return Step(self.key[:, :longest], self.value[:, :longest], self.capacity, ragged, new=new)

    def write(self, step: Step) -> None:
        key, value, after, *_ = step.new
        if isinstance(after, list):
            starts, counts = step.new[3:]
            put(self.key, key, starts, counts)
            put(self.value, value, starts, counts)
        else:
            self._write_where_it_fits(step, key, value)

    def _write_where_it_fits(self, step: Step, key: torch.Tensor | None, value: torch.Tensor | None) -> None:
        """Every token has a slot of its own, modulo the capacity; those that may not be written write back what stands there."""
        more, fits = step.new[3:]
        number = torch.arange(step.new[0].shape[1], device=self.key.device)
        slot = (self.lengths[:, None] + number).remainder(self.capacity).long()
        row = torch.arange(self.key.shape[0], device=self.key.device)[:, None]
        taken = fits[:, None].expand(-1, number.shape[0]) if isinstance(more, int) else fits[:, None] & (number < more[:, None])
        for buffer, new in ((self.key, key), (self.value, value)):
            new = torch.zeros((), dtype=buffer.dtype, device=buffer.device) if new is None else new
            buffer.index_put_((row, slot), torch.where(taken[:, :, None, None], new, buffer[row, slot]))

    def commit(self, step: Step) -> None:
        after = step.new[2]
        if isinstance(after, list):
            self.lengths.copy_(torch.tensor(after, dtype=torch.int32))
        else:
            self.lengths.copy_(after)
            self.overflowed.logical_or_(~step.new[4].all())

    def undo(self, step: Step) -> None:
        after = step.new[2]
        if isinstance(after, list):
            clear(self.key, step.new[3], after)
            clear(self.value, step.new[3], after)
        else:
            self._write_where_it_fits(step, None, None)

    def crop(self, lengths: Lengths) -> None:
        if self.key.device.type == "cpu" or not isinstance(lengths, torch.Tensor):
            wanted = torch.tensor(shorter(self.lengths.tolist(), lengths), dtype=torch.int32, device=self.key.device)
        else:
            wanted = torch.minimum(self.lengths, lengths.to(self.lengths).clamp_min(0))
        gone = torch.arange(self.capacity, device=self.key.device)[None] >= wanted[:, None]
        self.key.masked_fill_(gone[..., None, None], 0.0)
        self.value.masked_fill_(gone[..., None, None], 0.0)
        self.lengths.copy_(wanted)

    def reorder(self, indices: torch.Tensor) -> None:
        """Row b becomes what row `indices[b]` was, in place: the batch size stays."""
        rows = row_numbers(indices, self.key.shape[0]) if not torch.is_tensor(indices) or indices.device.type == "cpu" else indices
        index = torch.as_tensor(rows, device=self.key.device)
        if index.shape != (self.key.shape[0],):
            raise ValueError(f"indices: one for each of the {self.key.shape[0]} rows, got shape {tuple(index.shape)}")
        for buffer in (self.key, self.value, self.lengths):
            buffer.copy_(buffer.index_select(0, index))

    def reset(self, rows: Sequence[int] | torch.Tensor | None = None) -> None:
        if rows is None:
            self.key.zero_(), self.value.zero_(), self.lengths.zero_(), self.overflowed.zero_()
            return
        index = torch.tensor(row_numbers(rows, self.key.shape[0]), device=self.key.device)
        for buffer in (self.key, self.value, self.lengths):
            buffer.index_fill_(0, index, 0)

    def fork(self) -> StaticLayer:
        with torch.inference_mode(False):
            new = StaticLayer(self.key.clone(), self.value.clone())
        new.lengths.copy_(self.lengths)
        new.overflowed.copy_(self.overflowed)
        return new

    def contents(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        longest = int(self.lengths.max()) if self.key.shape[0] else 0
        return self.key[:, :longest], self.value[:, :longest], self.lengths.clone()

    def restore(self, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor) -> None:
        check_new(key, value, self.key, self.value, self.key.shape[0])
        if key.shape[1] > self.capacity:
            raise ValueError(f"key: at most {self.capacity} slots, the cache's capacity, got {key.shape[1]}")
        self.reset()
        self.key[:, : key.shape[1]], self.value[:, : value.shape[1]] = key, value
        self.lengths.copy_(lengths)


class StaticCache(Cache):
    """A cache of fixed size for all layers: decode steps compile once, and can be captured into a CUDA graph.

    A mask over it covers its whole capacity. Bytes: 2 * layers * batch * capacity * key_heads * head_dim * the dtype's size.
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
        def room(dim: int) -> torch.Tensor:
            with torch.inference_mode(False):
                return torch.zeros(batch, capacity, key_heads, dim, dtype=dtype, device=device)

        super().__init__([StaticLayer(room(head_dim), room(head_dim if value_dim is None else value_dim)) for _ in range(layers)])

    @property
    def overflowed(self) -> torch.Tensor:
        """Whether an append went past the capacity, and was left out, where the host could not know: a bool on the device."""
        return torch.stack([layer.overflowed for layer in self.layers]).any()
