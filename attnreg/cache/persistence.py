"""A cache's content on disk: a prompt is read once, saved, and resumed."""

from __future__ import annotations

from typing import Any

import torch

from .protocol import check_pair

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
        for name in ("lengths", *_SLIDING):
            numbers = state.get(f"layers.{i}.{name}", lengths)
            if numbers.dtype not in (torch.int32, torch.int64) or numbers.shape != lengths.shape:
                raise ValueError(
                    f"state: {name} of layer {i} as int32 or int64, {tuple(lengths.shape)}, got {numbers.dtype}, {tuple(numbers.shape)}"
                )
        layer, seen, held = cache.layer(i), lengths.tolist(), state.get(f"layers.{i}.held")
        try:
            check_pair(key, value)
            if hasattr(layer, "held_in"):
                layer.held_in(key, lengths, held)
            elif any(not 0 <= n <= key.shape[1] for n in seen):
                raise ValueError(f"lengths: each between 0 and {key.shape[1]}, the slots given, got {seen}")
            elif held is not None and held.tolist() != seen:
                raise ValueError(f"held: only a SlidingCache takes the last {held.tolist()} tokens of rows of length {seen}")
        except ValueError as error:
            raise ValueError(f"state: layer {i}: {error}") from None
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
    whole = (content["key"], content["value"], content["lengths"])
    if not hasattr(layer, "held_in"):
        layer.restore(*whole)
        return
    layer.restore(*whole, content["held"])
    layer.dropped_padding = content["dropped_padding"]


def save(cache: Any, path: Any) -> None:
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("save: needs safetensors; pip install 'attnreg[cache]'", name="safetensors") from error
    save_file(state_dict(cache), path, metadata={"format": "attnreg cache", "version": "1"})


def load(cache: Any, path: Any) -> None:
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("load: needs safetensors; pip install 'attnreg[cache]'", name="safetensors") from error
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise ValueError(f"path: {path} is damaged, or no safetensors file: {error}") from error
    if metadata.get("format") != "attnreg cache" or metadata.get("version") != "1":
        raise ValueError(f"path: {path} holds no attnreg cache of version 1, but says {metadata}")
    load_state_dict(cache, state)
