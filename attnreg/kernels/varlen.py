"""torch's `varlen_attn` (torch.nn.attention.varlen): flash-attention 2 over segments, with no library besides torch.

Its arguments changed with almost every release, so they are read off its signature: 2.10 has `is_causal`, and neither scale nor window; 2.11
has `scale` and a `window_size` pair, whose (-1, 0) is what causal was; 2.12 adds `enable_gqa` (the kernel always took grouped heads),
`seqused_k` and `block_table`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from ..backend import Backend, Output
from ..call import AttentionCall
from ..capabilities import NATIVE, Capabilities, Dims, Reason
from ..packing import padding_must_fit
from ..spec import AttentionSpec, Feature
from .limits import flash_lacks_memory, no_early_window, rows_fit
from .lse import with_empty_rows
from .order import rank_of
from .rows import lies_in_runs, notes_of_runs, rows_of, runs_of


class Kernel(NamedTuple):
    """`varlen_attn` as it is installed."""

    function: Callable[..., Any]
    lse_request: Any
    arguments: frozenset[str]


class _Found:
    kernel: Kernel | None = None
    """Looked for once, when the claims are asked for; never under the compiler's eyes."""


def kernel_of(module: Any) -> Kernel:
    """What a module called torch.nn.attention.varlen offers."""
    return Kernel(module.varlen_attn, module.AuxRequest(lse=True), frozenset(inspect.signature(module.varlen_attn).parameters))


def find() -> Kernel | None:
    """The kernel, or None. Without CUDA it could not run: its module is left alone, which would bring all of torch._dynamo with it."""
    if _Found.kernel is None and torch.version.cuda is not None:
        try:
            _Found.kernel = kernel_of(importlib.import_module("torch.nn.attention.varlen"))
        except (ImportError, AttributeError, ValueError):
            return None
    return _Found.kernel


def run_varlen(call: AttentionCall) -> Output:
    """Runs the kernel over the real tokens as segments: where they lie, or one behind the other and then put back, zeros at padding."""
    kernel = _Found.kernel or find()
    rows = runs_of(call) if lies_in_runs(call.spec) else rows_of(call)
    if rows.empty:
        return rows.nothing(call)
    query, key, value, options = rows.query, rows.key, rows.value, {}
    if call.pages is not None:
        options = {"seqused_k": call.key_ends, "block_table": call.pages.block_table.to(torch.int32)}
    elif query.shape[-1] % 8:
        query, key, value = (pad(t, (0, -t.shape[-1] % 8)) for t in (query, key, value))
    elif not (call.spec.unit_stride and call.spec.aligned):
        query, key, value = (t.clone(memory_format=torch.contiguous_format) for t in (query, key, value))
    options |= _options(call, kernel.arguments)
    if call.return_lse:
        options["return_aux"] = kernel.lse_request
    longest_query, longest_key = rows.longest
    if longest_query == 1 and call.query_heads != call.key_heads:
        # For one query a segment the kernel lays the heads of a group side by side, and then counts on every segment having that query.
        longest_query = 1 if rows.every_segment_asks else 2
    result = kernel.function(query, key, value, rows.cu_query, rows.cu_key, longest_query, longest_key, **options)
    output, lse = result if call.return_lse else (result, None)
    output = rows.restored(output[..., : call.value_dim])
    if lse is None:
        return output
    # (Hq, T), whatever the documentation says; +inf where nothing is seen.
    return output, rows.restored_lse(with_empty_rows(lse))


def _options(call: AttentionCall, arguments: frozenset[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if "scale" in arguments:
        options["scale"] = call.scale
    if "window_size" in arguments:
        # A tuple: the function compares it with (-1, 0) to find causality.
        left, right = call.window or (None, None)
        options["window_size"] = (-1 if left is None else left, 0 if call.causal else -1 if right is None else right)
    else:
        options["is_causal"] = call.causal
    if "enable_gqa" in arguments:
        options["enable_gqa"] = call.query_heads != call.key_heads
    return options


# ---------------------------------------------------------------------- the claims


def _missing() -> Reason | None:
    if torch.version.cuda is None:
        return Reason("missing", "CUDA kernels", f"torch {torch.__version__} without CUDA", "install a torch build for CUDA")
    if find() is None:
        return Reason("missing", "torch.nn.attention.varlen", f"not in torch {torch.__version__}", "install torch >= 2.10")
    return None


def padding_needs_the_host(spec: AttentionSpec) -> Reason | None:
    """The number of real tokens is a tensor size, which a graph can't learn from the device."""
    masks = spec.query_mask or spec.key_mask or spec.key_lengths or spec.query_lengths or spec.key_starts
    if masks and (spec.compiling or spec.capturing):
        mode = Feature.COMPILE if spec.compiling else Feature.CAPTURE
        return Reason(mode.value, "with padding that has to be dropped", "without, or packed rows", "pack once, outside, with cu_seqlens")
    return None


def _padding_needs_the_host(spec: AttentionSpec) -> Reason | None:
    # A compiled or captured lone query is left to kernels that split its keys.
    if lies_in_runs(spec) and not spec.single_query:
        return None
    # The lengths of a paged cache are read by the kernel itself.
    asked = spec._replace(key_lengths=False) if spec.page_size else spec
    return padding_needs_the_host(asked)


def _deterministic_backward(spec: AttentionSpec) -> Reason | None:
    if spec.deterministic and spec.gradients:
        return Reason(Feature.DETERMINISTIC.value, "with gradients", "forward only: the function takes no such argument")
    return None


def _backward_memory(spec: AttentionSpec) -> Reason | None:
    if spec.capability is not None and flash_lacks_memory(spec):
        return Reason(Feature.BACKWARD.value, f"head dim {spec.head_dim} on this card", "192 or less there")
    return None


def _pages(spec: AttentionSpec) -> Reason | None:
    if not spec.page_size:
        return None
    if spec.page_size % 256:
        return Reason(Feature.PAGED.value, f"pages of {spec.page_size} slots", "pages of a multiple of 256 slots")
    if spec.head_dim % 8:
        return Reason("head_dim", str(spec.head_dim), "a multiple of 8 with a paged cache, whose pages are not copied")
    if spec.gradients:
        return Reason(Feature.PAGED.value, "with gradients", "inference only")
    if spec.key_mask or spec.key_starts:
        return Reason(Feature.PAGED.value, "with key_mask or key_starts", "with key_lengths")
    return None


def _equal_dims(spec: AttentionSpec) -> Reason | None:
    if spec.head_dim != spec.value_dim:
        return Reason(Feature.VALUE_DIM.value, f"value dim {spec.value_dim} with head dim {spec.head_dim}", "equal ones")
    return None


def claims_of(kernel: Kernel | None) -> Capabilities:
    """The claims for a signature; None stands for the newest."""
    arguments = frozenset({"scale", "window_size", "seqused_k", "block_table"}) if kernel is None else kernel.arguments
    features = {
        Feature.CAUSAL: NATIVE,
        Feature.UNEQUAL_LENGTHS: NATIVE,
        Feature.QUERY_MASK: NATIVE,
        Feature.KEY_MASK: NATIVE,
        Feature.KEY_LENGTHS: NATIVE,
        Feature.QUERY_LENGTHS: NATIVE,
        Feature.KEY_STARTS: NATIVE,
        Feature.PACKED: NATIVE,
        Feature.LSE: NATIVE,
        Feature.GROUPED_HEADS: NATIVE,
        Feature.BACKWARD: NATIVE,
        Feature.COMPILE: NATIVE,
        Feature.CAPTURE: NATIVE,
        Feature.DETERMINISTIC: NATIVE,
    }
    if "scale" in arguments:
        features[Feature.SCALE] = NATIVE
    if "window_size" in arguments:
        features[Feature.WINDOW] = NATIVE
    if {"seqused_k", "block_table"} <= arguments:
        features[Feature.PAGED] = NATIVE
    return Capabilities(
        features=features,
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        # Without a scale argument a padded head dim would change the scale.
        head_dim=Dims(largest=256, multiple=1 if "scale" in arguments else 8),
        smallest_capability=(8, 0),
        rules=(
            rows_fit,
            padding_must_fit,
            _padding_needs_the_host,
            _deterministic_backward,
            _backward_memory,
            no_early_window,
            _pages,
            _equal_dims,
        ),
    )


def _notes(spec: AttentionSpec) -> Sequence[str]:
    notes = ["torch's varlen_attn"]
    if lies_in_runs(spec):
        notes += notes_of_runs(spec)
    elif spec.padded and not spec.packed and not spec.page_size:
        notes.append("drops padding, which is known to change nothing: gathers the real tokens, and scatters the result")
        if spec.key_lengths or spec.query_lengths or spec.key_starts:
            notes.append("counts the real tokens on the host: one copy a call; attnreg.Padding with known lengths spares it")
    if spec.packed:
        notes.append("without max_seqlens, reads cu_seqlens on the host: one copy a call")
    if spec.head_dim % 8:
        notes.append("pads head dims to multiples of 8, in copies")
    return notes


varlen = Backend(
    name="varlen",
    run=run_varlen,
    capabilities=lambda: claims_of(find()),
    priority=rank_of("varlen"),
    missing=_missing,
    notes=_notes,
    packs=True,
)
