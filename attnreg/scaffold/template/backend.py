"""The NAME attention backend. Replace `run` by your kernel, then claim, one by one, what it can do."""

from __future__ import annotations

import torch
from attnreg import EMULATED, NATIVE, AttentionCall, Backend, Capabilities, Dims, Feature, Reason, hookimpl


def missing() -> Reason | None:
    """Why this backend can't run here, or None. Import your kernel library here and in `run`, never at the top of the module."""
    return None


def run(call: AttentionCall) -> torch.Tensor:
    """Query, key and value come as (B, H, S, D), as `layout` below says, with nothing asked that is not claimed below."""
    group = call.query_heads // call.key_heads
    key, value = call.key.repeat_interleave(group, 1), call.value.repeat_interleave(group, 1)
    scores = call.scale * (call.query.float() @ key.float().transpose(-1, -2))
    if call.causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return (scores.softmax(-1) @ value.float()).to(call.query.dtype)


backend = Backend(
    name="NAME",
    run=run,
    capabilities=Capabilities(
        # What is not here is refused, with the reason; the conformance suite proves what is.
        features={
            Feature.CAUSAL: NATIVE,
            Feature.GROUPED_HEADS: EMULATED("repeats key and value heads"),
            Feature.SCALE: NATIVE,
            Feature.VALUE_DIM: NATIVE,
            Feature.BACKWARD: NATIVE,
        },
        devices=("cpu", "cuda"),
        dtypes=(torch.float16, torch.bfloat16, torch.float32),
        head_dim=Dims(largest=256),
        value_dim=Dims(largest=256),
    ),
    # Below 0: chosen automatically only when nothing else can. Raise it when a benchmark says so.
    priority=-10,
    missing=missing,
    layout="bhsd",
)


@hookimpl
def attnreg_backends():
    return [backend]
