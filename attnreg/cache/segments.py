"""Packed steps with a cache: segment n appends to and attends row n, by way of a padded batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ..call import AttentionCall
from ..checks.segments import check_starts
from .steps import check_cache

NOTE = "pads the packed segments into rows of the cache, and packs the output again"


def in_rows(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The call with one row a segment, its result packed as the caller's was. `function`: attention, or explain."""
    check_cache(*(arguments[name] for name in ("cache", "key", "value", "key_lengths")))
    for name in ("query_mask", "key_mask", "mask", "bias", "query_lengths", "key_starts"):
        if arguments[name] is not None:
            raise ValueError(f"{name}: not together with cu_seqlens and a cache; give one row a request, with query_lengths")
    if arguments["layout"] != "bshd":
        raise ValueError(f"layout: 'bshd' with cu_seqlens and a cache, got {arguments['layout']!r}; transpose(1, 2) the tensors")
    call, appends = _without_cache(arguments), arguments["key"] is not None
    cu, size = call.cu_seqlens, call.query_length
    starts = cu[0].tolist()
    check_starts("cu_seqlens[0]", starts, size)  # on a device it is looked at here only
    if cu[1] is not cu[0] and cu[1].tolist() != starts:
        raise ValueError(f"cu_seqlens: with a cache, which knows its rows' lengths, cu_k is cu_q, {starts}; got {cu[1].tolist()}")
    check_starts("cu_seqlens[1]", starts, call.key_length)
    counts = [b - a for a, b in zip(starts, starts[1:])]
    rows = torch.tensor([n for n, c in enumerate(counts) for _ in range(c)], dtype=torch.long, device=call.device)
    places = torch.tensor([i for c in counts for i in range(c)], dtype=torch.long, device=call.device)

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor[0, : starts[-1]]
        return flat.new_zeros((len(counts), max(counts, default=0), *flat.shape[1:])).index_put((rows, places), flat)

    def packed(output: torch.Tensor) -> torch.Tensor:
        flat = output.new_zeros((size, *output.shape[2:]))
        flat[: starts[-1]] = output[rows, places]
        if call.shape_given == "flat":
            flat = flat.flatten(1)
        return flat if call.shape_given == "packed rows" else flat[None]

    changed = {
        "query": padded(call.query),
        "key": padded(call.key) if appends else None,
        "value": padded(call.value) if appends else None,
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


def _without_cache(arguments: dict[str, Any]) -> AttentionCall:
    """Tensors and segments as any packed call has them, checked. Queries that append nothing stand for the keys too."""
    given = {name: arguments[name] for name in ("query", "key", "value", "cu_seqlens", "max_seqlens", "n_heads", "n_kv_heads")}
    if given["key"] is None:
        given.update(key=given["query"], value=given["query"], n_kv_heads=None)
    return AttentionCall(**given)
