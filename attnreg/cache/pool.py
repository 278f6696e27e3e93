"""The pages of a layer: which are free, and how many rows hold each of the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch


class Pool:
    """Pages of one layer, counted by how many rows hold each. Page 0 is never given out and stays zero: it fills the tables' gaps."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values
        self.holders = [0] * keys.shape[0]
        self.holds = 0
        """How often pages came to be held by one more row."""
        self.free = dict.fromkeys(range(1, keys.shape[0]))
        """A set that keeps its order."""
        self.flat = (keys.flatten(0, 1), values.flatten(0, 1))

    def take(self, pages: Sequence[int]) -> None:
        """These free pages, as zeros."""
        for page in pages:
            del self.free[page]
            self.holders[page] = 1
        if pages:
            index = torch.tensor(pages, device=self.keys.device)
            self.keys.index_fill_(0, index, 0.0)
            self.values.index_fill_(0, index, 0.0)

    def take_any(self, count: int) -> list[int]:
        """As many pages of zeros. Raises ValueError, and takes none, when there are too few."""
        if count > len(self.free):
            raise ValueError(
                f"cache: {count} new pages needed, {len(self.free)} of {len(self.holders) - 1} are free; free(rows) of finished requests, "
                "or make a larger PagedCache"
            )
        pages = list(islice(self.free, count))
        self.take(pages)
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        self.holds += 1
        for page in pages:
            self.free.pop(page, None)
            self.holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                self.free[page] = None

    def __reduce__(self) -> tuple:
        """A pickle or a copy with every page free: the layers that come along hold theirs again, and what others held is free there."""
        return type(self), (self.keys, self.values)
