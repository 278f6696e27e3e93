"""Position ids with a cache: slots, less the padding before them."""

from __future__ import annotations

import torch

from .protocol import LayerCache


def positions(layer: LayerCache, n_new: int, key_mask: torch.Tensor | None) -> torch.Tensor:
    """(B, n_new) int64: the slot of each new token less the padded slots before it in its row, never below 0. Reads no device."""
    lengths = layer.lengths
    if key_mask is not None:
        if key_mask.dtype != torch.bool:
            raise TypeError(f"key_mask: bool, True = a real token, got {key_mask.dtype}")
        rows = lengths.shape[0] or key_mask.shape[0]
        if tuple(key_mask.shape) != (rows, layer.slots(n_new)):
            raise ValueError(
                f"key_mask: shape (B, cache.slots({n_new})) = {(rows, layer.slots(n_new))}, past and new, got {tuple(key_mask.shape)}"
            )
    if lengths.shape[0] == 0:
        lengths = torch.zeros(1 if key_mask is None else key_mask.shape[0], dtype=torch.int32)
    device = lengths.device if key_mask is None else key_mask.device
    lengths = lengths.to(device).long()
    new = torch.arange(n_new, device=device)[None]
    slot = lengths[:, None] + new
    if key_mask is None:
        return slot
    # A sliding cache has dropped slots, and remembers how many of them were padding.
    dropped, padded = getattr(layer, "dropped", None), getattr(layer, "dropped_padding", None)
    column = slot if not dropped else slot - torch.as_tensor(dropped, device=device)[:, None]
    hidden = (~key_mask).long()
    before = (hidden.cumsum(1) - hidden).gather(1, column.clamp(0, key_mask.shape[1] - 1))
    if padded is not None:
        before = before + padded.to(device)[:, None]
    return (slot - before).clamp_min(0)
