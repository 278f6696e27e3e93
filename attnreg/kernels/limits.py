"""Limits that kernels of several libraries share, as functions and rules of the spec."""

from __future__ import annotations

from ..capabilities import Reason
from ..spec import AttentionSpec, Feature

MOST_ROWS = 65535
"""Rows of a batch in one launch: they are the second or third dimension of the CUDA kernels' grid."""


def rows_fit(spec: AttentionSpec) -> Reason | None:
    """The rule of kernels that don't split a batch into launches. Sizes are known as powers of two, so the last half is refused too."""
    if spec.sizes is not None and spec.sizes[0] > MOST_ROWS:
        return Reason("batch", f"more than {MOST_ROWS // 2} rows", "fewer, in one launch", "sdpa takes them part by part")
    return None


def misreads_window(spec: AttentionSpec) -> bool:
    """flash-attention 2's kernels take a right side of Sk slots or more for unlimited, and an unlimited one beside a limited left one for Sk
    slots. Either is wrong for queries that sit before slot 0."""
    if spec.window is None or spec.causal or spec.single_query:
        return False
    lengths = spec.key_lengths or spec.query_lengths or spec.key_starts
    fewer = spec.sizes is not None and spec.sizes[1] < spec.sizes[2] and not (spec.padded or spec.page_size)
    alike = not lengths and (not spec.key_mask or (spec.key_mask == "right" and spec.query_mask == "right"))
    return not fewer and not (spec.equal_lengths and alike)


def no_early_window(spec: AttentionSpec) -> Reason | None:
    """The rule of backends with such a kernel."""
    if not misreads_window(spec):
        return None
    return Reason(
        Feature.WINDOW.value, "without causality, where a row may have more queries than keys", "with causality, or equal lengths"
    )


def flash_lacks_memory(spec: AttentionSpec) -> bool:
    """aten's flash-attention can't train every head dim on cards with 100 KB of shared memory (8.6 to 8.9, 12.x)."""
    small = (8, 6) <= spec.capability <= (8, 9) or spec.capability[0] == 12
    size = max(spec.head_dim, spec.value_dim)
    return small and bool(spec.gradients) and (192 < size <= 224 or (size > 224 and spec.dropout))


def no_huge_bias(spec: AttentionSpec) -> Reason | None:
    """The rule of backends without a kernel like math (`sdpa.kernel_for`)."""
    if spec.device != "cuda" or not spec.huge_bias:
        return None
    asked = (
        "with gradients and finite numbers beyond 1e5" if not (spec.compiling or spec.capturing) else "with gradients, of unknown values"
    )
    return Reason(
        Feature.BIAS.value, asked, "smaller ones: the weights are taken from the lse", "give -inf for what is not seen; sdpa takes all"
    )
