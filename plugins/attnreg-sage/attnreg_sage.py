"""SageAttention 1.0.6: scores from int8 queries and keys, values in float16 (arXiv:2410.02367). Approximate, forward only."""

from __future__ import annotations

import torch

from attnreg import NATIVE, AttentionCall, Backend, Capabilities, Dims, Feature, hookimpl, needs

BOUND = 64.0
"""Times the exact backends' allowed error: an estimate from the int8 step, not a measurement."""


def run_sage(call: AttentionCall) -> torch.Tensor:
    """Calls `sageattn` with the four arguments it honours; it swallows all others in silence."""
    from sageattention import sageattn

    query, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (call.query, call.value))
    # `sageattn` subtracts the mean of the keys from them in place.
    key = call.key.clone(memory_format=torch.contiguous_format)
    return sageattn(query, key, value, tensor_layout="NHD", is_causal=call.causal, sm_scale=call.scale)


sage = Backend(
    name="sage",
    run=run_sage,
    capabilities=Capabilities(
        features={Feature.CAUSAL: NATIVE, Feature.SCALE: NATIVE, Feature.GROUPED_HEADS: NATIVE},
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        head_dim=Dims(only=(64, 96, 128)),
        smallest_capability=(8, 0),
        bound=BOUND,
    ),
    priority=60,
    missing=needs("sageattention>=1.0.6,<2", remedy="pip install attnreg-sage[sage]"),
    notes=lambda spec: ("copies the keys, which the library would change in place", "int8 scores, float16 values"),
)


@hookimpl
def attnreg_backends() -> list[Backend]:
    return [sage]
