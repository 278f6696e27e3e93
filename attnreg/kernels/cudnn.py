"""cuDNN's fused attention, through torch's own operator: on Hopper and Blackwell the fastest dense prefill and decode that torch ships.

The public `scaled_dot_product_attention` fills bool masks with -65504 for it (torch 2.11) and lets a float32 mask be read as half
precision; here every mask is additive, in the query's dtype, with -inf. Causality of the kernel is top-left, so it is used for equal
lengths only. What is known to give NaN is refused by a rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from ..backend import Backend, Output
from ..call import AttentionCall
from ..capabilities import EMULATED, NATIVE, Capabilities, Dims, Reason, Support
from ..spec import AttentionSpec, Feature
from .order import rank_of
from .sdpa import needs_mask, run_around

_WIDE = 91900
"""The cuDNN version on which head dims up to 256 were seen to be right, forward and backward, on an H200; elsewhere 128 is the limit."""


def run_cudnn(call: AttentionCall) -> Output:
    """Runs the operator in (B, H, S, D)."""
    return run_around(_cudnn, call, "cudnn")


def _cudnn(call: AttentionCall, query, key, value, mask, causal) -> tuple[torch.Tensor, torch.Tensor | None]:
    query, key, value = (pad(t, (0, -t.shape[3] % 8)) if t.shape[3] % 8 else t for t in (query, key, value))
    if mask is not None:
        mask = mask.expand(*mask.shape[:3], key.shape[2]).contiguous()
    needs_lse = call.return_lse or bool(call.spec.gradients)
    output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, mask, needs_lse, 0.0, causal, False, scale=call.scale
    )
    # The kernel's lse is (B, H, S, 1).
    return output[..., : call.value_dim], lse.squeeze(-1) if call.return_lse else None


def _missing() -> Reason | None:
    if not hasattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention"):
        return Reason("missing", "cuDNN attention", "a torch with aten::_scaled_dot_product_cudnn_attention", "install torch >= 2.10")
    if torch.version.cuda is None or not torch.backends.cudnn.is_available():
        return Reason("missing", "cuDNN", f"torch {torch.__version__} without it", "install a torch build for CUDA, with cuDNN")
    return None


# ---------------------------------------------------------------------- the claims


def _masked_backward(spec: AttentionSpec) -> Reason | None:
    # On compute capability 9.0 the query's gradient is NaN with a mask when Sk % 128 == 64 and a row's lse is below -88.7.
    if spec.gradients and needs_mask(spec):
        return Reason(Feature.BACKWARD.value, "with a mask, bias or padding of keys", "without: cuDNN can give NaN gradients there")
    return None


def _single_query_backward(spec: AttentionSpec) -> Reason | None:
    # cuDNN 9.25 and 9.26: gradients of key and value are NaN for one query whose lse is negative.
    if spec.gradients and spec.single_query:
        return Reason(Feature.BACKWARD.value, "with a single query", "several queries: cuDNN can give NaN gradients for one")
    return None


def _few_heads(spec: AttentionSpec) -> Reason | None:
    # Silently wrong on B200 with fewer than 8 key heads, torch 2.11 and 2.13.
    if spec.capability is not None and spec.capability[0] == 10 and spec.key_heads < 8:
        return Reason(Feature.GROUPED_HEADS.value, f"{spec.key_heads} key heads on compute capability 10.x", "8 or more there")
    return None


def _wide_heads(spec: AttentionSpec) -> Reason | None:
    largest = max(spec.head_dim, spec.value_dim)
    if largest > 128 and spec.capability is not None and spec.capability != (9, 0):
        return Reason("head_dim", str(largest), "128 or less, more only on compute capability 9.0")
    return None


def _window(spec: AttentionSpec) -> Support:
    return EMULATED("a (B or 1, 1, Sq, Sk) mask")


def _unequal(spec: AttentionSpec) -> Support:
    if spec.single_query and spec.window is None and spec.alibi is None:
        return NATIVE
    return EMULATED("a (B or 1, 1, Sq, Sk) mask for the diagonal")


def _capabilities() -> Capabilities:
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    dims = Dims(largest=256 if version is not None and version >= _WIDE else 128)
    return Capabilities(
        features={
            Feature.CAUSAL: NATIVE,
            Feature.UNEQUAL_LENGTHS: _unequal,
            Feature.WINDOW: _window,
            Feature.QUERY_MASK: NATIVE,
            Feature.KEY_MASK: NATIVE,
            Feature.MASK: NATIVE,
            Feature.BIAS: NATIVE,
            Feature.KEY_LENGTHS: NATIVE,
            Feature.QUERY_LENGTHS: NATIVE,
            Feature.KEY_STARTS: NATIVE,
            Feature.ALIBI: EMULATED("a (B or 1, Hq, Sq, Sk) bias"),
            Feature.SCALE: NATIVE,
            Feature.LSE: NATIVE,
            Feature.GROUPED_HEADS: NATIVE,
            Feature.VALUE_DIM: NATIVE,
            Feature.BACKWARD: NATIVE,
            Feature.COMPILE: NATIVE,
            Feature.CAPTURE: NATIVE,
        },
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        head_dim=dims,
        value_dim=dims,
        smallest_capability=(8, 0),
        rules=(_masked_backward, _single_query_backward, _few_heads, _wide_heads),
    )


def _notes(spec: AttentionSpec) -> Sequence[str]:
    notes = []
    if spec.padded and not spec.finite_padding:
        notes.append("cleans padding in copies of query, key and value; finite_padding=True spares them")
    if spec.head_dim % 8 or spec.value_dim % 8:
        notes.append("pads head dims to multiples of 8")
    return notes


cudnn = Backend(
    name="cudnn", run=run_cudnn, capabilities=_capabilities, priority=rank_of("cudnn"), missing=_missing, layout="bhsd", notes=_notes
)  # fmt: skip
