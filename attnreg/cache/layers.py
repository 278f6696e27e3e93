"""What all caches of a whole model share: layers, and operations on all of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..checks.numbers import whole_number
from .positions import positions
from .protocol import LayerCache, Lengths


class Cache:
    """The layers of one model's cache. `cache.layer(i)` or `cache[i]` is what `attention(..., cache=)` takes.

    Lengths, slots and positions are those of the first layer: ask before a forward, not in the middle of one.
    """

    def __init__(self, layers: list) -> None:
        self.layers = layers

    def layer(self, index: int) -> LayerCache:
        index = whole_number("layer", index, None)
        if not 0 <= index < len(self.layers):
            raise IndexError(f"layer: 0 to {len(self.layers) - 1}, got {index}")
        return self.layers[index]

    def __getitem__(self, index: int) -> LayerCache:
        return self.layer(index)

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.layers)  # by index, one that makes layers as they are asked for would never end

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def lengths(self) -> torch.Tensor:
        """(B,) int32: the tokens that each row has seen."""
        return self.layer(0).lengths

    def slots(self, n_new: int) -> int:
        """The width of a key mask for a call that appends `n_new` tokens."""
        return self.layer(0).slots(n_new)

    def positions(self, n_new: int, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Position ids (B, n_new) of the next tokens: each one's slot less the padded slots before it, never below 0.

        key_mask: (B, slots(n_new)) bool, True for a real token, the new ones included.
        """
        return positions(self.layer(0), n_new, key_mask)

    def crop(self, lengths: Lengths) -> None:
        """Forgets what is past `lengths`, a number or one for each row: what a speculative decoder does with rejected tokens."""
        self._every("crop", lengths)

    def reorder(self, indices: torch.Tensor) -> None:
        """Row b becomes what row `indices[b]` was: beam search."""
        self._every("reorder", indices)

    def reset(self, rows: Sequence[int] | torch.Tensor | None = None) -> None:
        """Empties some rows, or all."""
        self._every("reset", rows)

    def fork(self) -> Any:
        """An independent cache that starts as this one is."""
        new = copy.copy(self)
        new.layers = [layer.fork() for layer in self.layers]
        return new

    def _every(self, name: str, argument: Any) -> None:
        for layer in self.layers:
            getattr(layer, name)(argument)

    @classmethod
    def from_legacy(cls, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], layout: str = "bhsd", **options: Any) -> Any:
        """A cache from a tuple of (key, value) a layer; `layout` as in `layouts.LAYOUTS`, `options` those of the constructor."""
        from .layouts import from_legacy

        return from_legacy(cls, layers, layout, options)

    def to_legacy(self, layout: str = "bhsd") -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """(key, value) of each layer as views in another layout. All rows must have the same length."""
        from .layouts import to_legacy

        return to_legacy(self, layout)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything the cache holds, as contiguous tensors that safetensors can save."""
        from .persistence import state_dict

        return state_dict(self)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Takes a `state_dict` in place of what is there. Raises ValueError, and changes nothing, when it does not fit."""
        from .persistence import load_state_dict

        load_state_dict(self, state)

    def save(self, path: Any) -> None:
        """Writes the state to a safetensors file."""
        from .persistence import save

        save(self, path)

    def load(self, path: Any) -> None:
        """Reads what `save` wrote. Raises ValueError for a damaged or mismatched file."""
        from .persistence import load

        load(self, path)
