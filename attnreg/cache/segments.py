"""Packed steps with a cache: segment n appends to and attends row n, by way of a padded batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

NOTE = "pads the packed segments into rows of the cache, and packs the output again"


def in_rows(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The call with one row a segment, its result packed as the caller's was. `function`: attention, or explain."""
    for name in ("query_mask", "key_mask", "mask", "bias", "query_lengths", "key_starts"):
        if arguments[name] is not None:
            raise ValueError(f"{name}: not together with cu_seqlens and a cache; give one row a request, with query_lengths")
    cu = arguments["cu_seqlens"]
    if not isinstance(cu, tuple) or len(cu) != 2:
        raise TypeError("cu_seqlens: a pair (cu_q, cu_k) of cumulative starts; for self-attention give the same tensor twice")
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    if arguments["layout"] != "bshd" or query.dim() not in (3, 4) or (query.dim() == 4 and query.shape[0] != 1):
        raise ValueError(f"query: packed rows (T, Hq, D) or (1, T, Hq, D) in layout 'bshd', got {tuple(query.shape)}")
    starts = cu[0].tolist()
    size = query.shape[-3]
    if starts[0] != 0 or any(b < a for a, b in zip(starts, starts[1:])) or starts[-1] > size:
        raise ValueError(f"cu_seqlens[0]: starts at 0, never decreases, ends at or before {size}, got {starts}")
    if key is not None and cu[1] is not cu[0] and cu[1].tolist() != starts:
        raise ValueError(f"cu_seqlens: with a cache cu_k says what is appended, and must be cu_q, {starts}; got {cu[1].tolist()}")
    counts = [b - a for a, b in zip(starts, starts[1:])]
    rows = torch.tensor([n for n, c in enumerate(counts) for _ in range(c)], dtype=torch.long, device=query.device)
    places = torch.tensor([i for c in counts for i in range(c)], dtype=torch.long, device=query.device)

    def padded(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        flat = tensor.reshape(-1, *tensor.shape[-2:])[: starts[-1]]
        return flat.new_zeros((len(counts), max(counts, default=0), *flat.shape[1:])).index_put((rows, places), flat)

    def packed(output: torch.Tensor) -> torch.Tensor:
        flat = output.new_zeros((size, *output.shape[2:]))
        flat[: starts[-1]] = output[rows, places]
        return flat if query.dim() == 3 else flat[None]

    changed = {
        "query": padded(query),
        "key": padded(key),
        "value": padded(value),
        "query_lengths": counts,
        "cu_seqlens": None,
        "max_seqlens": None,
    }
    result = function(**{**arguments, **changed})
    if dataclasses.is_dataclass(result):
        return dataclasses.replace(result, notes=(*result.notes, NOTE))
    if not arguments["return_lse"]:
        return packed(result)
    output, lse = result
    flat = lse.new_full((1, lse.shape[1], size), float("-inf"))
    flat[0, :, : starts[-1]] = lse[rows, :, places].T
    return packed(output), flat
