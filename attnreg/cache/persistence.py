"""A cache's content on disk: a prompt is read once, saved, and resumed."""

from __future__ import annotations

from typing import Any

import torch

_NAMES = ("key", "value", "lengths")
_SLIDING = ("held", "dropped_padding")
"""Of a sliding cache besides."""


def state_dict(cache: Any) -> dict[str, torch.Tensor]:
    state = {}
    for index, layer in enumerate(cache.layers):
        for name, tensor in zip(_NAMES, layer.contents()):
            state[f"layers.{index}.{name}"] = tensor.detach().clone(memory_format=torch.contiguous_format)
        for name in _SLIDING:
            if (tensor := getattr(layer, name, None)) is not None:
                state[f"layers.{index}.{name}"] = tensor.clone()
    return state


def load_state_dict(cache: Any, state: dict[str, torch.Tensor]) -> None:
    count = sum(1 for name in state if name.endswith(".key"))
    if cache.layers and count != len(cache.layers):
        raise ValueError(f"state: {len(cache.layers)} layers, as the cache has, got {count}")
    known = {f"layers.{i}.{name}" for i in range(count) for name in (*_NAMES, *_SLIDING)}
    missing = {f"layers.{i}.{name}" for i in range(count) for name in _NAMES} - set(state)
    if missing or set(state) - known:
        raise ValueError(f"state: no state of a cache: missing {sorted(missing)}, unknown {sorted(set(state) - known)}")
    rows = set()
    for i in range(count):
        key, value, lengths = (state[f"layers.{i}.{name}"] for name in _NAMES)
        if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3] or lengths.shape != key.shape[:1]:
            raise ValueError(
                f"state: layer {i} needs key (B, T, Hkv, D), value (B, T, Hkv, Dv) and lengths (B,), got "
                f"{tuple(key.shape)}, {tuple(value.shape)}, {tuple(lengths.shape)}"
            )
        if lengths.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"state: lengths of layer {i} as int32 or int64, got {lengths.dtype}")
        keeps = hasattr(cache.layer(i), "keep")
        held = state.get(f"layers.{i}.held")
        if held is not None and (held.shape != lengths.shape or bool(((held < 0) | (held > key.shape[1]) | (held > lengths)).any())):
            raise ValueError(f"state: held of layer {i} between 0 and the lengths {lengths.tolist()}, got {held.tolist()}")
        if lengths.numel() and (int(lengths.min()) < 0 or (not keeps and int(lengths.max()) > key.shape[1])):
            raise ValueError(f"state: lengths of layer {i} between 0 and {key.shape[1]}, got {lengths.tolist()}")
        rows.add(key.shape[0])
    if len(rows) > 1:
        raise ValueError(f"state: one batch size for all layers, got {sorted(rows)}")
    # Content is put back where a later layer does not fit, so that the whole cache is as it was.
    before = [_content(cache.layer(i)) for i in range(count)]
    try:
        for i in range(count):
            _restore(cache.layer(i), {name: state.get(f"layers.{i}.{name}") for name in (*_NAMES, *_SLIDING)})
    except BaseException:
        for i, content in enumerate(before):
            _restore(cache.layer(i), content)
        raise


def _content(layer: Any) -> dict[str, torch.Tensor] | None:
    if not layer.lengths.numel():
        return None
    content = dict(zip(_NAMES, (tensor.clone() for tensor in layer.contents())))
    return {**content, **{name: getattr(layer, name, None) for name in _SLIDING}}


def _restore(layer: Any, content: dict[str, torch.Tensor] | None) -> None:
    if content is None:
        layer.reset()
        return
    held = {"held": content["held"]} if content["held"] is not None and hasattr(layer, "keep") else {}
    layer.restore(content["key"], content["value"], content["lengths"], **held)
    if content["dropped_padding"] is not None:
        layer.dropped_padding = content["dropped_padding"]


def save(cache: Any, path: Any) -> None:
    from safetensors.torch import save_file

    save_file(state_dict(cache), path, metadata={"format": "attnreg cache", "version": "1"})


def load(cache: Any, path: Any) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise ValueError(f"path: {path} is damaged, or no safetensors file: {error}") from error
    if metadata.get("format") != "attnreg cache" or metadata.get("version") != "1":
        raise ValueError(f"path: {path} holds no attnreg cache of version 1, but says {metadata}")
    load_state_dict(cache, state)
