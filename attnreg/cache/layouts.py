"""Caches to and from the layouts of others, as views where one exists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..checks.numbers import whole_number
from ..checks.tensors import check_tensor

View = Callable[[torch.Tensor, int], torch.Tensor]

TO: Mapping[str, tuple[View, View]] = {
    "bshd": (lambda k, h: k, lambda v, h: v),
    "bhsd": (lambda k, h: k.transpose(1, 2), lambda v, h: v.transpose(1, 2)),
    "flat": (lambda k, h: k.flatten(2), lambda v, h: v.flatten(2)),
    "bhds": (lambda k, h: k.permute(0, 2, 3, 1), lambda v, h: v.transpose(1, 2)),
}
"""From (B, T, Hkv, D): "bshd" flash-attn's (B, T, Hkv, D); "bhsd" transformers' (B, Hkv, T, D); "flat" (B, T, Hkv*D); "bhds"
llm-foundry's keys (B, Hkv, D, T) with values (B, Hkv, T, D). All are views."""

FROM: Mapping[str, tuple[View, View]] = {
    "bshd": TO["bshd"],
    "bhsd": TO["bhsd"],
    "flat": (lambda k, h: k.unflatten(2, (h, -1)), lambda v, h: v.unflatten(2, (h, -1))),
    "bhds": (lambda k, h: k.permute(0, 3, 1, 2), lambda v, h: v.transpose(1, 2)),
}


def _known(layout: str) -> str:
    if layout not in TO:
        raise ValueError(f"layout: one of {', '.join(TO)}, got {layout!r}")
    return layout


def from_legacy(cls: type, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], layout: str, options: dict[str, Any]) -> Any:
    """A cache of class `cls`. `key_heads` says how to split flat tensors. An empty sequence makes an empty cache."""
    key_way, value_way = FROM[_known(layout)]
    heads = options.pop("key_heads", None) if layout == "flat" and cls.__name__ == "DynamicCache" else options.get("key_heads")
    if layout == "flat":
        if heads is None:
            raise ValueError("key_heads: the number of key heads, which a flat (B, T, Hkv*D) tensor does not show")
        heads = whole_number("key_heads", heads, 1)
    cache = cls(**options)
    for index, (key, value) in enumerate(layers):
        for name, tensor in (("key", key), ("value", value)):
            check_tensor(f"{name} of layer {index}", tensor)
            wanted = 3 if layout == "flat" else 4
            if tensor.dim() != wanted:
                raise ValueError(f"{name} of layer {index}: {wanted} dimensions in layout {layout!r}, got shape {tuple(tensor.shape)}")
            if layout == "flat" and tensor.shape[2] % heads:
                raise ValueError(f"{name} of layer {index}: a flat size that is a multiple of key_heads={heads}, got {tensor.shape[2]}")
        key, value = key_way(key, heads), value_way(value, heads)
        if key.shape[:3] != value.shape[:3]:
            raise ValueError(
                f"layer {index}: key and value differ as (B, T, Hkv), {tuple(key.shape[:3])} and {tuple(value.shape[:3])}, in layout {layout!r}"
            )
        lengths = torch.full((key.shape[0],), key.shape[1], dtype=torch.int32)
        cache.layer(index).restore(key, value, lengths)
    return cache


def to_legacy(cache: Any, layout: str) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    key_way, value_way = TO[_known(layout)]
    out = []
    for layer in cache.layers:
        key, value, lengths = layer.contents()
        if key.shape[0] and int(lengths.min()) != int(lengths.max()):
            raise ValueError(f"cache: rows of one length, since tuples can't say otherwise, got {lengths.tolist()}; crop to the shortest")
        if key.shape[0] and int(lengths.max()) != key.shape[1]:
            raise ValueError(f"cache: of {int(lengths.max())} tokens only the last {key.shape[1]} are kept, which a tuple can't say")
        out.append((key_way(key, 0), value_way(value, 0)))
    return tuple(out)


def from_transformers(past: Any) -> Any:
    """A `DynamicCache` that takes over the tensors of a transformers Cache, without a copy; its layers must hold whole pasts."""
    from .dynamic import DynamicCache

    pairs = []
    for index, layer in enumerate(past.layers):
        if getattr(layer, "keys", None) is None:
            raise ValueError(f"layer {index}: nothing was appended yet")
        seen = int(layer.get_seq_length())
        key, value = layer.keys, layer.values
        if getattr(layer, "is_sliding", False) and seen > key.shape[2]:
            raise ValueError(f"layer {index}: a sliding layer of {seen} tokens holds only its last {key.shape[2]}")
        pairs.append((key[:, :, :seen], value[:, :, :seen]))
    return DynamicCache.from_legacy(pairs)


def to_transformers(cache: Any) -> Any:
    """A transformers DynamicCache over views of this cache's keys and values (it concatenates, and so never writes into them)."""
    from transformers import DynamicCache as TheirCache

    theirs = TheirCache()
    for index, (key, value) in enumerate(to_legacy(cache, "bhsd")):
        theirs.update(key, value, index)
    return theirs
