"""What flash-attn 2, 3 and 4 have in common: the ways by which a call reaches a kernel, and what is put right around it.

Five ways, a function of the spec: "dense" as it is; "segments" for packed rows; "cached" where every row's keys are one run of slots in a
buffer, or pages, which the inference kernels read in place; "runs" where segments name the real tokens, one run a row, where they lie;
"gathered" where padding is dropped in a copy and the result is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..backend import Output
from ..call import AttentionCall
from ..capabilities import Reason
from ..packing import padding_must_fit
from ..spec import AttentionSpec, Feature
from ..visibility import real_queries
from .lse import NEGATIVE_INFINITY, beside_sinks, with_empty_rows
from .rows import lies_in_runs, notes_of_runs, rows_of, runs_of
from .sdpa import widened

Result = tuple[torch.Tensor, "torch.Tensor | None"]
"""Output (B, Sq, Hq, Dv) or (T, Hq, Dv), and the lse (B, Hq, Sq) or (Hq, T) as the kernel gives it, or None."""


class Kernels(NamedTuple):
    """One library's three functions, each with the call for its options."""

    dense: Callable[..., Result]
    """(call, query, key, value)"""
    segments: Callable[..., Result]
    """(call, query, key, value, cu_query, cu_key, longest_query, longest_key)"""
    cached: Callable[..., Result]
    """(call, query, keys, values, lengths, starts or None, block_table or None); lengths, starts and table are int32"""
    reads_lengths: bool = True
    """The cached function takes the length of each row."""
    reads_starts: bool = True
    """The cached function takes the first slot of each row."""
    value_dim: Callable[[int, int, bool], bool] = lambda head_dim, value_dim, gradients: head_dim == value_dim
    """Whether the kernels take this head dim with this value dim, with gradients or without; else both are padded to the larger."""
    fills_gaps: bool = False
    """The segments function writes zeros for queries without keys and, backward, for keys without queries, whatever stands in both."""
    gradient_dims: int = 8
    """With gradients, head dims are made multiples of this; else of 8."""
    reads_whole_tiles: bool = False
    """Values past the end of a row's keys are loaded and multiplied by 0, so that they must be finite."""
    takes_sinks: Callable[[AttentionSpec], bool] = lambda spec: False
    """The functions take the call's sinks, which are in the lse then; else the result is scaled by its lse and the sink."""


def way_for(spec: AttentionSpec, kernels: Kernels) -> str:
    """How a spec reaches the kernel: "dense", "segments", "cached", "runs" or "gathered"."""
    if spec.page_size:
        return "cached"
    if spec.packed:
        return "segments"
    if not (spec.key_mask or spec.key_lengths or spec.query_lengths or spec.key_starts):
        return "dense"
    # Compiled, a lone query is left to kernels that split its keys: those that read them in place are out of the compiler's sight.
    runs = kernels.fills_gaps and lies_in_runs(spec) and not (spec.compiling and spec.single_query)
    otherwise = "runs" if runs else "gathered"
    if spec.gradients or spec.dropout or spec.compiling or spec.query_lengths:
        return otherwise
    measured = spec.key_lengths or spec.key_starts
    if spec.key_starts or spec.key_mask == "left":
        whole = not (measured and spec.key_mask)
        return "cached" if whole and kernels.reads_starts else otherwise
    if spec.key_mask == "right" and not measured:
        # The cached function aligns to the row's end. The one query that sees everything needs no diagonal.
        free = not spec.distances or (spec.single_query and spec.window is None and spec.alibi is None and not spec.query_mask)
        return "cached" if free and kernels.reads_lengths else otherwise
    return "cached" if spec.key_lengths and not spec.key_mask and kernels.reads_lengths else otherwise


def run_flash(call: AttentionCall, kernels: Kernels) -> Output:
    """Runs a call in the layout (B, S, H, D) and gives it the contract's meaning."""
    spec = call.spec
    way = way_for(spec, kernels)
    scaled = call.sinks is not None and not kernels.takes_sinks(spec)
    needs_lse = call.return_lse or scaled
    if way in ("segments", "runs", "gathered"):
        rows = runs_of(call) if way == "runs" else rows_of(call)
        if rows.empty:
            return _finished(call, *_pair(rows.nothing(call)), way, scaled=call.sinks is not None)
        # For one query a segment the kernels lay the heads of a group side by side, and count on every segment having that query.
        longest_query, longest_key = rows.longest
        if longest_query == 1 and not rows.every_segment_asks:
            longest_query = 2
        value = rows.value
        if kernels.reads_whole_tiles and way == "segments" and not spec.finite_padding and call.max_seqlens is not None:
            value = _zero_past(value, rows.cu_key[-1], 0)
        tensors = fitted(call, kernels, rows.query, rows.key, value)
        if spec.alibi == "rows" and way == "runs":
            call = call.replaced(alibi_slopes=rows.by_segment(call.alibi_slopes), _spec=spec)
        tensors = _apart(call, *tensors, rows.cu_query, rows.cu_key)
        output, lse = kernels.segments(call, *tensors, longest_query, longest_key)
        output = rows.restored(output[..., : call.value_dim])
        lse = rows.restored_lse(with_empty_rows(lse)) if needs_lse else None
        return _finished(call, output, lse, way, scaled)
    if way == "cached":
        keys, values, table = call.key, call.value, None
        if call.pages is not None:
            keys, values, table = call.pages.keys, call.pages.values, call.pages.block_table.to(torch.int32)
        lengths, starts = _extent(call)
        ends_early = spec.key_lengths or spec.key_mask == "right"
        if kernels.reads_whole_tiles and table is None and ends_early and not spec.finite_padding:
            values = _zero_past(values, lengths[:, None], 1)
        output, lse = kernels.cached(call, *fitted(call, kernels, call.query, keys, values), lengths, starts, table)
    else:
        query = call.query
        if call.query_mask is not None and spec.gradients and not spec.finite_padding:
            # A NaN in a padded query would reach the gradients of the keys, as 0 * NaN.
            query = query.masked_fill(~call.query_mask[:, :, None, None], 0.0)
        output, lse = kernels.dense(call, *_apart(call, *fitted(call, kernels, query, call.key, call.value)))
    lse = with_empty_rows(lse) if needs_lse else None
    return _finished(call, output[..., : call.value_dim], lse, way, scaled)


def fitted(call: AttentionCall, kernels: Kernels, query, key, value) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Head dims as the kernels take them, with zeros; the scale stays that of the true one."""
    spec = call.spec
    multiple = _multiple(spec, kernels)
    head_dim, value_dim = (size + -size % multiple for size in (spec.head_dim, spec.value_dim))
    if not kernels.value_dim(head_dim, value_dim, bool(spec.gradients)):
        head_dim = value_dim = max(head_dim, value_dim)
    if spec.unit_stride and spec.aligned and head_dim == spec.head_dim and value_dim == spec.value_dim:
        return query, key, value
    return _fitted(query, head_dim, spec), _fitted(key, head_dim, spec), _fitted(value, value_dim, spec)


def _fitted(tensor: torch.Tensor, size: int, spec: AttentionSpec) -> torch.Tensor:
    if tensor.shape[-1] != size:
        return widened(tensor, size)
    # The kernels read 16 bytes at a time along a last dimension of stride 1.
    return tensor if spec.unit_stride and spec.aligned else tensor.clone(memory_format=torch.contiguous_format)


def _apart(call: AttentionCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each an object of its own: the compiler traces no function with a backward of its own that is given one of them twice."""
    return tuple(t.view_as(t) for t in tensors) if call.spec.compiling and call.spec.gradients else tensors


def _multiple(spec: AttentionSpec, kernels: Kernels) -> int:
    return kernels.gradient_dims if spec.gradients else 8


def _extent(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where each row's keys end and, if not at slot 0, start: (B,) int32."""
    if call.key_mask is not None:
        starts, ends = call.key_padding.bounds
        return ends, starts if call.key_padding.form == "left" else None
    ends, starts = call.key_ends, call.key_starts
    return ends, None if starts is None else torch.minimum(starts, ends).to(torch.int32)


def _zero_past(value: torch.Tensor, end: torch.Tensor, dim: int) -> torch.Tensor:
    slot = torch.arange(value.shape[dim], device=value.device)
    return value.masked_fill((slot >= end)[..., None, None], 0.0)


def _pair(result: Output) -> Result:
    return result if isinstance(result, tuple) else (result, None)


def _finished(call: AttentionCall, output: torch.Tensor, lse: torch.Tensor | None, way: str, scaled: bool) -> Output:
    """The sink, if the result is to be scaled for it, and zeros at padded queries."""
    if scaled:
        if lse is None:  # nothing at all was computed
            lse = torch.full((call.batch, call.query_heads, call.query_length), NEGATIVE_INFINITY, device=call.device)
        share, lse = beside_sinks(lse, call.sinks)
        output = (output * share.transpose(1, 2)[..., None]).to(call.query.dtype)
    same = call.query_padding is not None and call.query_padding is call.key_padding and call.query_padding.form == "left"
    # Queries before the first key of a causal call see nothing: the kernel has written their zeros.
    zero_already = way in ("runs", "gathered") or (same and call.causal and call.spec.equal_lengths and way == "cached")
    if call.sinks is not None or (call.query_mask is not None and not zero_already):
        queries = real_queries(call)
        if queries is not None:
            output = output.masked_fill(~queries[:, :, None, None], 0.0)
            lse = None if lse is None else lse.masked_fill(~queries[:, None], NEGATIVE_INFINITY)
    if call.spec.gradients and not call.spec.compiling and output.requires_grad:
        output.register_hook(refuse_second)
    return (output, lse) if call.return_lse else output


def refuse_second(gradient: torch.Tensor) -> None:
    """The libraries' backward runs outside autograd: a loss of their gradients would take these for constants, and say nothing."""
    if torch.is_grad_enabled():
        raise RuntimeError("the kernel has no second derivative: no create_graph=True through it; backend='reference' has one")


# ---------------------------------------------------------------------- rules and claims that all three share


def dropped_padding_must_fit(kernels: Callable[[], Kernels]) -> Callable[[AttentionSpec], Reason | None]:
    return lambda spec: padding_must_fit(spec) if way_for(spec, kernels()) in ("runs", "gathered") else None


def padding_needs_the_host(kernels: Callable[[], Kernels]) -> Callable[[AttentionSpec], Reason | None]:
    """The number of real tokens is a tensor size, which a graph can't learn from the device."""

    def rule(spec: AttentionSpec) -> Reason | None:
        if not (spec.compiling or spec.capturing):
            return None
        way = way_for(spec, kernels())
        if way == "gathered" or (way == "cached" and spec.compiling):
            mode = Feature.COMPILE if spec.compiling else Feature.CAPTURE
            remedy = "declare the padding (attnreg.packing.Padding, lengths), or pack once, outside, and give cu_seqlens"
            return Reason(mode.value, "with padding or pages", "without, or with padding that this kernel takes where it lies", remedy)
        return None

    return rule


def sinks_learn_in_the_kernel(kernels: Callable[[], Kernels]) -> Callable[[AttentionSpec], Reason | None]:
    def rule(spec: AttentionSpec) -> Reason | None:
        if spec.sinks and spec.gradients and not kernels().takes_sinks(spec):
            return Reason(Feature.SINKS.value, "with gradients", "forward only: the sink is put in after the kernel, from its lse")
        return None

    return rule


def notes_for(spec: AttentionSpec, kernels: Kernels) -> Sequence[str]:
    way = way_for(spec, kernels)
    notes, multiple = [f"{way} keys" if way == "cached" else way], _multiple(spec, kernels)
    if spec.head_dim % multiple or spec.value_dim % multiple:
        notes.append(f"pads head dims to multiples of {multiple}, in copies")
    if way == "runs":
        notes += notes_of_runs(spec)
    ends_early = spec.key_lengths or spec.key_mask == "right"
    if way == "cached" and kernels.reads_whole_tiles and ends_early and not spec.page_size and not spec.finite_padding:
        notes.append("cleans values past the end in a copy; finite_padding=True spares it")
    if way == "gathered":
        known = "known to fit packing" if spec.padding_fits_packing else "without distances"
        notes.append(
            f"gathers the real tokens and scatters the result, padding being {known}; the same Padding object is packed once for all layers"
        )
        if spec.key_lengths or spec.query_lengths or spec.key_starts:
            notes.append("counts the real tokens on the host: one copy a call; attnreg.packing.Padding with known lengths spares it")
    if way == "segments":
        notes.append("without max_seqlens, reads cu_seqlens on the host: one copy a call")
    return notes


def pages_rule(multiple: int) -> Callable[[AttentionSpec], Reason | None]:
    def rule(spec: AttentionSpec) -> Reason | None:
        if not spec.page_size:
            return None
        paged = Feature.PAGED.value
        if spec.page_size % multiple:
            return Reason(paged, f"pages of {spec.page_size} slots", f"pages of a multiple of {multiple} slots")
        if spec.head_dim % 8 or spec.value_dim != spec.head_dim:
            dims = f"head dim {spec.head_dim}, value dim {spec.value_dim}"
            return Reason(paged, dims, "equal ones, a multiple of 8: pages are not copied")
        if spec.gradients or spec.dropout:
            return Reason(paged, "with gradients or dropout", "inference")
        if spec.key_mask or spec.key_starts or spec.query_lengths or spec.packed:
            return Reason(paged, "with key_mask, key_starts, query_lengths or cu_seqlens", "with key_lengths")
        return None

    return rule
