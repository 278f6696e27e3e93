"""FlashInfer 0.7: batch prefill over segments, and decode over a paged cache (arXiv:2501.01005). Forward only, on CUDA.

Its wrappers take a plan, made on the host from the segments' ends, and run it for as many layers as ask the same. Causality is aligned to
the last key and `window_left` does not count the query itself, as here. The lse is to base 2, and the library's minus infinity is a number
near -5e4, so rows that see nothing are known from the segments and set here.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from attnreg import EMULATED, NATIVE, AttentionCall, AttentionSpec, Backend, Capabilities, Dims, Feature, Reason, hookimpl, needs
from attnreg.kernels.rows import rows_of
from attnreg.packing import padding_must_fit

WORKSPACE = 128 * 2**20
"""Bytes that the library asks for: one buffer for all wrappers of a stream."""
MOST_PLANS = 16


class Plan(NamedTuple):
    """A wrapper that was given its plan, and what the plan was made of."""

    wrapper: Any
    blind: torch.Tensor | None
    """Rows that see nothing, (T,) bool on the device; None: every row sees something."""
    sizes: tuple
    """What the host knows of segments or lengths."""
    sources: tuple[tuple[torch.Tensor, int | None], ...]
    """Index tensors on the device, with their versions: the same objects, unchanged, need not be read again."""
    numbers: tuple[torch.Tensor, ...]
    """What they hold, on the host: the same numbers need no new plan."""
    copied: torch.cuda.Event | None
    """Behind the plan's copy to the device."""


_plans: dict[tuple, Plan] = {}
_workspaces: dict[tuple, torch.Tensor] = {}
_one_at_a_time = threading.Lock()
"""A wrapper holds one plan, and all wrappers of a stream share a workspace: nothing may come between a plan and its run."""


def run_flashinfer(call: AttentionCall) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Maps the call to pages or segments, plans unless the last call of its kind asked the same, and runs."""
    with _one_at_a_time:
        return _decode(call) if call.pages is not None else _prefill(call)


def _prefill(call: AttentionCall) -> Any:
    import flashinfer

    packed, sizes = call.cu_seqlens is not None, (call.batch, call.query_length, call.key_length)
    # With max_seqlens, rows_of reads no lengths on the host: the plan does, and only when it is made.
    rows = rows_of(call.replaced(max_seqlens=sizes[1:]) if packed else call)
    if rows.empty:
        return rows.nothing(call)

    def make(wrapper: Any, *ends: torch.Tensor) -> torch.Tensor:
        ends = ends or tuple(torch.tensor([0, *itertools.accumulate(lengths)]) for lengths in rows.lengths)
        dims = (call.query_heads, call.key_heads, call.head_dim, call.value_dim)
        wrapper.plan(*(cu.to(torch.int32) for cu in ends), *dims, causal=call.causal, **_options(call))
        queries, keys = (cu.diff() for cu in ends)
        segment = torch.repeat_interleave(queries)
        from_end = ends[0][1:][segment] - torch.arange(len(segment))
        return keys[segment] < from_end if call.causal else keys[segment] == 0

    sources = ()
    if None in rows.lengths:
        sources = call.cu_seqlens if packed else (rows.cu_query, rows.cu_key)
    else:
        sizes += tuple(map(tuple, rows.lengths))
    plan = _planned(call, flashinfer.BatchPrefillWithRaggedKVCacheWrapper, {}, sizes, sources, make)
    queries, keys = [int(cu[-1]) for cu in plan.numbers] or (rows.query.shape[0], rows.key.shape[0])
    if not (queries and keys):
        return rows.nothing(call)
    rows = rows._replace(query=rows.query[:queries], key=rows.key[:keys], value=rows.value[:keys], real=None)
    result = plan.wrapper.run(*map(_readable, (rows.query, rows.key, rows.value)), return_lse=call.return_lse)
    output, lse = _repaired(result, plan.blind)
    return rows.restored(output) if lse is None else (rows.restored(output), rows.restored_lse(lse))


def _decode(call: AttentionCall) -> Any:
    import flashinfer

    pages, size = call.pages, call.pages.keys.shape[1]

    def make(wrapper: Any, table: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        lengths = torch.full((call.batch,), call.key_length) if lengths is None else lengths
        used = lengths.clamp(min=1)  # an empty row reads one slot, as the library wants, and is set to zero after
        counts = (used + size - 1) // size
        indices = table[torch.arange(table.shape[1]) < counts[:, None]].clamp(min=0)
        indexes = [t.to(torch.int32) for t in (pad(counts.cumsum(0), (1, 0)), indices, (used - 1) % size + 1)]
        wrapper.plan(*indexes, call.query_heads, call.key_heads, call.head_dim, size, **_options(call))
        return lengths == 0

    # The kernel for tensor cores reads a key once for all query heads of its group.
    options = {"use_tensor_cores": call.query_heads // call.key_heads > 2}
    kind = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    given = call.key_lengths is not None
    sizes, sources = (
        ((call.batch,), (pages.block_table, call.key_lengths)) if given else ((call.batch, call.key_length), (pages.block_table,))
    )
    plan = _planned(call, kind, options, sizes, sources, make)
    query, keys, values = map(_readable, (call.query.squeeze(1), pages.keys, pages.values))
    if keys.stride() != values.stride():  # of which the kernel takes one set
        keys, values = (pool.clone(memory_format=torch.contiguous_format) for pool in (keys, values))
    result = plan.wrapper.run(query, (keys, values), return_lse=call.return_lse)
    output, lse = _repaired(result, plan.blind)
    return output.unsqueeze(1) if lse is None else (output.unsqueeze(1), lse.T.unsqueeze(2))


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Itself or a copy. The kernels read 16 bytes at a time along a last dimension of stride 1, and do not look whether they may."""
    width = tensor.element_size()
    fits = tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0 and not any(n * width % 16 for n in tensor.stride()[:-1])
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def _options(call: AttentionCall) -> dict[str, Any]:
    left = -1 if call.window is None or call.window[0] is None else call.window[0]
    return {"window_left": left, "sm_scale": call.scale, "q_data_type": call.query.dtype, "kv_data_type": call.query.dtype}


def _planned(call: AttentionCall, kind: type, options: dict, sizes: tuple, sources: tuple, make: Callable[..., torch.Tensor]) -> Plan:
    """The last plan of this kind if it was made of the same, else a new one, on the same wrapper where there is one.

    make: gives a wrapper its plan, and returns which rows see nothing.
    """
    stream = torch.cuda.current_stream(call.device).cuda_stream if call.device.type == "cuda" else 0
    dims = (call.query_heads, call.key_heads, call.head_dim, call.value_dim)
    key = (kind, *options.values(), call.device, stream, *dims, call.causal, *_options(call).values())
    # Taken out: a plan that fails half-way leaves nothing behind.
    known = _plans.pop(key, None)
    # Tensors made under inference_mode count no versions.
    versions = tuple((tensor, None if tensor.is_inference() else tensor._version) for tensor in sources)
    fits = known is not None and known.sizes == sizes and len(known.sources) == len(sources)
    if fits and all(a is b and n == m is not None for (a, n), (b, m) in zip(versions, known.sources)):
        _plans[key] = known
        return known
    numbers = tuple(tensor.to("cpu", copy=True) for tensor in sources)
    if not (fits and all(map(torch.equal, numbers, known.numbers))):
        place = (call.device, stream)
        if place not in _workspaces:
            _workspaces[place] = torch.zeros(WORKSPACE, dtype=torch.uint8, device=call.device)
        if known:
            _wait_for_copy(known)
        wrapper = known.wrapper if known else kind(_workspaces[place], "NHD", backend="fa2", **options)
        blind = make(wrapper, *numbers)
        known = Plan(wrapper, blind.to(call.device) if blind.any() else None, sizes, versions, numbers, _mark(call.device))
    while len(_plans) >= MOST_PLANS:
        _wait_for_copy(_plans.pop(next(iter(_plans))))
    _plans[key] = known._replace(sources=versions)
    return known


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """The place where the current stream of a card is now."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _wait_for_copy(plan: Plan) -> None:
    """Until the card has taken the plan from the wrapper's page-locked buffer: the next plan writes over it at once."""
    if plan.copied is not None:
        plan.copied.synchronize()


def _repaired(result: Any, blind: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Zeros in rows that see nothing; and the lse, (T, Hq) to base 2, as (Hq, T) to base e with -inf there."""
    output, lse = result if isinstance(result, tuple) else (result, None)
    lse = None if lse is None else lse.T * math.log(2.0)
    if blind is not None:
        output = output.masked_fill(blind[:, None, None], 0.0)
        lse = None if lse is None else lse.masked_fill(blind, float("-inf"))
    return output, lse


# ---------------------------------------------------------------------- the claims


def _padding_must_fit(spec: AttentionSpec) -> Reason | None:
    # The lengths of pages are read as they are: nothing is dropped.
    return padding_must_fit(spec._replace(key_lengths=False) if spec.page_size else spec)


def _window(spec: AttentionSpec) -> Reason | None:
    if spec.window is not None and not spec.causal:
        return Reason(Feature.WINDOW.value, "without causal", "limited on the left, with causal")
    return None


def _pages(spec: AttentionSpec) -> Reason | None:
    masks = spec.query_mask or spec.query_lengths or spec.key_mask or spec.key_starts or spec.packed
    if spec.page_size and (masks or not spec.single_query):
        return Reason(Feature.PAGED.value, "with several queries, masks, starts or segments", "one query a row and key_lengths")
    return None


_GATHERED = EMULATED("gathers the real tokens and scatters the result")

flashinfer = Backend(
    name="flashinfer",
    run=run_flashinfer,
    capabilities=Capabilities(
        features={
            **dict.fromkeys((Feature.CAUSAL, Feature.UNEQUAL_LENGTHS, Feature.WINDOW, Feature.PACKED, Feature.PAGED), NATIVE),
            **dict.fromkeys((Feature.SCALE, Feature.LSE, Feature.GROUPED_HEADS), NATIVE),
            **dict.fromkeys((Feature.QUERY_MASK, Feature.KEY_MASK, Feature.QUERY_LENGTHS, Feature.KEY_STARTS), _GATHERED),
            Feature.KEY_LENGTHS: lambda spec: NATIVE if spec.page_size else _GATHERED,
        },
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        head_dim=Dims(only=(64, 128, 256)),
        smallest_capability=(8, 0),
        rules=(_padding_must_fit, _window, _pages),
    ),
    priority=-10,
    missing=needs("flashinfer-python>=0.7.4,<0.8", remedy="pip install attnreg-flashinfer[flashinfer]"),
    notes=lambda spec: (
        "plans on the host when segments, lengths or pages change; compiles its kernel when first used",
        *(() if spec.unit_stride and spec.aligned else ("copies what has a last stride other than 1 or rows not of 16 bytes",)),
    ),
    packs=True,
)


@hookimpl
def attnreg_backends() -> list[Backend]:
    return [flashinfer]
