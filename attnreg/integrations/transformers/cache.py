"""A cache for `past_key_values` that concatenates nothing.

transformers' own cache copies the whole past for every new token. Its static cache writes in place by itself, and needs nothing from here.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer as TheirLayer


class GrowingLayer(TheirLayer):
    """Keys and values are views, (B, Hkv, T, D), of room that grows by a quarter, laid out as (B, room, Hkv, D).

    Whatever transformers does to them otherwise (crop, reorder, repeat) makes other tensors, from which the room is begun anew. Outside of
    no_grad and inference_mode it appends out of place, as transformers does it, so that earlier steps keep their graphs. The same for all rows, and so
    less on each step than `attnreg.cache`'s dynamic layers, which know a length for each.
    """

    _room: tuple[torch.Tensor, torch.Tensor] | None = None
    _shown: torch.Tensor | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        empty = self.keys is None or not self.keys.numel()
        past = 0 if empty else self.keys.shape[2]
        new = key_states.shape[2]
        # Whether the graph of an earlier step holds the past, its keys don't say: it does where queries alone are trained.
        if torch.is_grad_enabled():
            self.keys = torch.cat([self.keys, key_states], 2) if past else key_states
            self.values = torch.cat([self.values, value_states], 2) if past else value_states
            return self.keys, self.values
        room = self._room
        if room is None or self.keys is not self._shown or past + new > room[0].shape[2] or _out_of_its_mode(room[0]):
            size = past + new
            self._room = room = tuple(_begun(tensor, size + size // 4 + 16) for tensor in (key_states, value_states))
            if past:
                room[0].narrow(2, 0, past).copy_(self.keys)
                room[1].narrow(2, 0, past).copy_(self.values)
        room[0].narrow(2, past, new).copy_(key_states)
        room[1].narrow(2, past, new).copy_(value_states)
        self.keys, self.values = room[0].narrow(2, 0, past + new), room[1].narrow(2, 0, past + new)
        self._shown = self.keys
        return self.keys, self.values

    def reset(self) -> None:
        # Some versions of transformers only zero the past here, and go on behind it.
        self.keys = self.values = None
        self.is_initialized = False


def _begun(like: torch.Tensor, size: int) -> torch.Tensor:
    batch, heads, _, dim = like.shape
    return like.new_zeros((batch, size, heads, dim)).transpose(1, 2)


def _out_of_its_mode(tensor: torch.Tensor) -> bool:
    """What was made under inference_mode can't be written outside of it."""
    return tensor.is_inference() and not torch.is_inference_mode_enabled()


def cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache for `model(..., past_key_values=)` and `model.generate(..., past_key_values=)`.

    Layers that keep a whole past are attnreg's; those of another kind, such as sliding ones, stay as transformers makes them.
    """
    made = DynamicCache(config=model.config)
    made.layers = [GrowingLayer() if type(layer) is TheirLayer else layer for layer in made.layers]
    return made
