"""What a KV cache is to a call: one small protocol, in two phases, so that a failed call leaves the cache as it was.

A call asks the layer's cache what the keys would be (`prepare`, which changes nothing), a backend is chosen, then the new tokens are put
into spare room (`write`), the backend runs, and only then do the new tokens count (`commit`). `undo` cleans spare room after a failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from ..checks.numbers import whole_number, whole_numbers

Lengths = int | Sequence[int] | torch.Tensor


class Pages(NamedTuple):
    """Keys and values in pages: what a paged cache hands to a call in place of `key` and `value`."""

    keys: torch.Tensor
    """(pages, page_size, Hkv, D)"""
    values: torch.Tensor
    """(pages, page_size, Hkv, Dv)"""
    block_table: torch.Tensor
    """(B, n) int32: the page that holds slots `page_size * c` to `page_size * (c + 1) - 1` of row b."""
    slots: int | None = None
    """Sk, where it is known to the host; else all slots of the n pages."""
    first: tuple[int, int] | None = None
    """Where row b's pages are known to be those from first[0] + b * first[1] on, one after the other: then they need no copy."""

    def gathered(self, pool: torch.Tensor) -> torch.Tensor:
        """(B, Sk, Hkv, D): the pages of each row one behind the other; a view where that is possible."""
        rows, width = self.block_table.shape
        if self.first is not None:
            page = pool.stride(0)
            strides = (self.first[1] * page, *pool.stride()[1:])
            whole = pool.as_strided((rows, width * pool.shape[1], *pool.shape[2:]), strides, pool.storage_offset() + self.first[0] * page)
        else:
            whole = pool.index_select(0, self.block_table.flatten()).view(rows, width * pool.shape[1], *pool.shape[2:])
        return whole if self.slots is None else whole[:, : self.slots]


class Step(NamedTuple):
    """One call's view of a layer: past and new tokens as they will be, once written."""

    key: torch.Tensor | None
    """(B, Sk, Hkv, D); None with `pages`."""
    value: torch.Tensor | None
    """(B, Sk, Hkv, Dv); None with `pages`."""
    slots: int
    """The width that masks and bias must have; where it is not Sk, they are cut, or padded with hidden slots."""
    key_lengths: torch.Tensor | None = None
    """(B,) int32 on the device, where rows end before Sk; None where all end there."""
    pages: Pages | None = None
    new: Any = None
    """What `write` and `commit` need; None when nothing is appended."""
    settled: bool = True
    """False where `key_lengths` are those after the call only once `write` has run: until then no choice may look at them."""


@runtime_checkable
class LayerCache(Protocol):
    """One layer of a cache: what `attention(..., cache=)` takes. All tensors are (B, S, Hkv, D).

    Spare room that a `Step` shows must hold finite numbers: zero what is allocated, and what crop, reset and undo give back.
    """

    @property
    def lengths(self) -> torch.Tensor:
        """(B,) int32: the tokens that each row has seen."""

    def slots(self, n_new: int) -> int:
        """Width of a key mask for a call that appends `n_new` tokens."""

    def prepare(
        self, key: torch.Tensor | None, value: torch.Tensor | None, counts: Any, window: tuple | None, key_mask: torch.Tensor | None
    ) -> Step:
        """What a call would see. Changes nothing. `counts`: how many of the new tokens each row appends, None for all.

        Raises ValueError when there is no room, or sizes don't fit; TypeError for another dtype.
        """

    def write(self, step: Step) -> None:
        """Puts the new tokens into spare room, where no length reaches yet."""

    def commit(self, step: Step) -> None:
        """Makes them count."""

    def undo(self, step: Step) -> None:
        """After a failure: gives the spare room back, as finite numbers."""

    def crop(self, lengths: Lengths) -> None: ...

    def reorder(self, indices: torch.Tensor) -> None: ...

    def reset(self, rows: Sequence[int] | torch.Tensor | None = None) -> None: ...

    def fork(self) -> LayerCache: ...

    def contents(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values up to the longest row, (B, T, Hkv, D), and the lengths (B,)."""

    def restore(self, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor) -> None:
        """Takes what `contents` gave, in place of what is there."""


# ---------------------------------------------------------------------- what every cache here does


def check_new(key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: int) -> None:
    """The new tokens against what is stored: (..., Hkv, D)."""
    if key.shape[0] != rows:
        raise ValueError(f"key: batch size {rows}, that of the cache, got {key.shape[0]}")
    for name, new, stored in (("key", key, keys), ("value", value, values)):
        if new.shape[2] != stored.shape[-2]:
            raise ValueError(f"{name}: {stored.shape[-2]} heads, as in the cache, got {new.shape[2]}; caches keep heads un-repeated")
        if new.shape[3] != stored.shape[-1]:
            raise ValueError(f"{name}: head dim {stored.shape[-1]}, as in the cache, got {new.shape[3]}")
        if new.dtype != stored.dtype:
            raise TypeError(f"{name}: the cache's dtype {stored.dtype}, got {new.dtype}; convert it, or make the cache in that dtype")
        if new.device != stored.device:
            raise ValueError(f"{name}: on the cache's device {stored.device}, got {new.device}; move one of them")


def check_pair(key: torch.Tensor, value: torch.Tensor) -> None:
    """Keys and values that a layer takes over as they are."""
    if key.dtype != value.dtype or not key.dtype.is_floating_point or key.device != value.device:
        raise ValueError(
            f"key, value: one floating dtype and one device for both, got {key.dtype} on {key.device} and {value.dtype} on {value.device}; "
            "convert one of them"
        )


def refuse_gradient(key: torch.Tensor, value: torch.Tensor) -> None:
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        raise ValueError("key, value: this cache takes no tensors that require grad; use DynamicCache, torch.no_grad() or detach()")


def host_counts(counts: Any, rows: int, n: int) -> list[int]:
    """How many of its n new tokens each row appends, as Python numbers."""
    if counts is None:
        return [n] * rows
    numbers = host_numbers("query_lengths", counts, rows)
    if any(not 0 <= c <= n for c in numbers):
        raise ValueError(f"query_lengths: each between 0 and {n}, the new tokens, got {numbers}")
    return numbers


def host_numbers(name: str, given: Lengths, rows: int) -> list[int]:
    if isinstance(given, int) and not isinstance(given, bool):
        return [given] * rows
    numbers = whole_numbers(name, given)
    if len(numbers) != rows:
        raise ValueError(f"{name}: one number a row, {rows} in all, got {numbers}")
    return numbers


def shorter(lengths: list[int], given: Lengths) -> list[int]:
    """The lengths to crop to, checked."""
    wanted = host_numbers("lengths", given, len(lengths))
    if any(not 0 <= n <= length for n, length in zip(wanted, lengths)):
        raise ValueError(f"lengths: each between 0 and the row's length, {lengths}, got {wanted}")
    return wanted


def row_numbers(rows: Any, batch: int) -> list[int]:
    """Some rows, or all."""
    return list(range(batch)) if rows is None else known_rows("rows", [rows] if isinstance(rows, int) else rows, batch)


def known_rows(name: str, given: Any, batch: int) -> list[int]:
    numbers = whole_numbers(name, given)
    if any(not 0 <= r < batch for r in numbers):
        there = f"between 0 and {batch - 1}" if batch else "of a row, and this cache has none yet"
        raise ValueError(f"{name}: each {there}, got {numbers}")
    return numbers


def storage_of(
    key_heads: Any, head_dim: Any, value_dim: Any, dtype: Any, device: torch.device | str | None
) -> tuple[int, tuple[int, int], torch.Tensor]:
    """Heads, both dims, and an empty tensor like those to come, of what a cache that allocates beforehand was asked for."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype: a floating torch.dtype, that of the keys and values to come, got {dtype!r}")
    dims = whole_number("head_dim", head_dim, 1), whole_number("value_dim", head_dim if value_dim is None else value_dim, 1)
    return whole_number("key_heads", key_heads, 1), dims, torch.empty(0, dtype=dtype, device=device)


def on_device(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cpu").to(device, non_blocking=True)


def zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Storage that may be written in and outside of inference mode."""
    with torch.inference_mode(False):
        return torch.zeros(tuple(shape), dtype=like.dtype, device=like.device)


@contextmanager
def writable() -> Iterator[None]:
    """Around operations that make such storage of what is there; with gradients only outside of inference mode, as ever."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


def places(starts: Sequence[int], counts: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row, slot and number of each token, for rows that take `counts` tokens from slot `starts` on."""
    rows = [b for b, c in enumerate(counts) for _ in range(c)]
    number = [i for c in counts for i in range(c)]
    slot = [starts[b] + i for b, i in zip(rows, number)]
    table = torch.tensor([rows, slot, number], dtype=torch.long, device="cpu").to(device, non_blocking=True)
    return table[0], table[1], table[2]


def put(buffer: torch.Tensor, new: torch.Tensor, starts: Sequence[int], counts: Sequence[int]) -> None:
    """Writes row b's first `counts[b]` new tokens to slots from `starts[b]` on, in place."""
    if len(set(starts)) == len(set(counts)) == 1:
        buffer[:, starts[0] : starts[0] + counts[0]] = new[:, : counts[0]]
    elif any(counts):
        rows, slot, number = places(starts, counts, buffer.device)
        buffer[rows, slot] = new[rows, number]


def clear(buffer: torch.Tensor, starts: Sequence[int], ends: Sequence[int]) -> None:
    """Zeros in slots `starts[b]` to `ends[b]` of each row."""
    for b, (start, end) in enumerate(zip(starts, ends)):
        if end > start:
            buffer[b, start:end].zero_()


def uniform(numbers: Sequence[int]) -> bool:
    return all(n == numbers[0] for n in numbers)
