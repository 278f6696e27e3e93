"""A cache for `past_key_values` that concatenates nothing: transformers' dynamic layers, stored in attnreg's.

transformers' own cache copies the whole past for every new token. Its static cache writes in place by itself, and needs nothing from here.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer as TheirLayer

from ...cache.dynamic import DynamicLayer


class GrowingLayer(TheirLayer):
    """Keys and values are views, (B, Hkv, T, D), of room that grows by a quarter.

    Whatever transformers does to them otherwise (crop, reorder, repeat) makes other tensors, from which the room is begun anew.
    """

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        if self.keys is None or self.keys is not getattr(self, "_shown", None):
            self._room = DynamicLayer()
            if self.keys is not None and self.keys.numel():
                key, value = self.keys.transpose(1, 2), self.values.transpose(1, 2)
                self._room.restore(key, value, torch.full((key.shape[0],), key.shape[1]))
        step = self._room.prepare(key_states.transpose(1, 2), value_states.transpose(1, 2), None, None, None)
        self._room.write(step)
        self._room.commit(step)
        self.keys, self.values = step.key.transpose(1, 2), step.value.transpose(1, 2)
        self._shown = self.keys
        return self.keys, self.values

    def reset(self) -> None:
        # Some versions of transformers only zero the past here, and go on behind it.
        self.keys = self.values = None
        self.is_initialized = False


def cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache for `model(..., past_key_values=)` and `model.generate(..., past_key_values=)`.

    Layers that keep a whole past are attnreg's; those of another kind, such as sliding ones, stay as transformers makes them.
    """
    made = DynamicCache(config=model.config)
    made.layers = [GrowingLayer() if type(layer) is TheirLayer else layer for layer in made.layers]
    return made
