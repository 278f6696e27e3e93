"""SageAttention 1.0.6: scores from int8 queries and keys, values in float16 (arXiv:2410.02367). Approximate, forward only."""

from __future__ import annotations

import torch

from attnreg import NATIVE, AttentionCall, AttentionSpec, Backend, Capabilities, Dims, Feature, Reason, hookimpl, needs

BOUND = 16.0
"""Times the exact backends' allowed error, for normal keys and values and queries of up to 4 times that size.

Queries and keys are int8 by blocks: an element is off by at most half a step of max|block| / 127, uniformly, which is a standard deviation
of max|block| / (127 * sqrt(12)). With elements of deviation 4 and 1, blocks' largest elements 3.5 times that, and scale 1/sqrt(D), a score
is then off by sqrt((4 * 3.5)^2 + (1 * 14)^2) / (127 * sqrt(12)) = 0.045 in standard deviation. Two keys that share a row's weight move the
output by a quarter of the difference of their errors times that of their values: 0.25 * (5 * 0.045 * sqrt(2)) * 6 = 0.48 where both are
extreme, and float16's allowed error is 8 * eps * max|value| = 0.03: 16 times. The package's kernels gave at most 4.7 times (`measure.py`).
All that holds for the default scale: another one makes scores, and their errors, as much larger, and is not claimed.
In bfloat16, whose allowed error is 8 times larger, the bound is as much laxer than the kernel.
"""

TOKENS = 128
"""Of one block of queries. The causal kernel of 1.0.6 goes through as many keys, and reads their int8 steps past the end of what there is
where the keys end before: NaN, if memory holds one there. No query sees the keys that stand behind it."""


def run_sage(call: AttentionCall) -> torch.Tensor:
    """Calls `sageattn` with the four arguments it honours; it swallows all others in silence."""
    from sageattention import sageattn

    missing = -call.query_length % TOKENS if call.causal else 0
    if missing:
        query, key, value = (torch.nn.functional.pad(t, (0, 0, 0, 0, 0, missing)) for t in (call.query, call.key, call.value))
    else:
        query, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (call.query, call.value))
        # `sageattn` subtracts the mean of the keys from them in place.
        key = call.key.clone(memory_format=torch.contiguous_format)
    rows = min(map(most_rows, (query, key, value)))
    parts = [
        sageattn(*(t[start : start + rows] for t in (query, key, value)), tensor_layout="NHD", is_causal=call.causal, sm_scale=call.scale)
        for start in range(0, call.batch, rows)
    ]
    output = parts[0] if len(parts) == 1 else torch.cat(parts)
    return output[:, : call.query_length]


def most_rows(tensor: torch.Tensor) -> int:
    """Rows that one launch takes: one of 65,535 blocks for rows and heads, whose kernels count the elements before a row in an int32."""
    before_a_row = max(tensor.stride(0), tensor[0].numel())
    return max(min(65535 // tensor.shape[2], (2**31 - 1) // before_a_row + 1), 1)


def _causal(spec: AttentionSpec) -> Reason | None:
    """Without causality the kernel counts the slots between the last key and the next multiple of 64 as keys of score 0."""
    if not spec.causal:
        return Reason(Feature.CAUSAL.value, "no", "causal calls: else the kernel of 1.0.6 sees keys that are not there")
    return None


sage = Backend(
    name="sage",
    run=run_sage,
    capabilities=Capabilities(
        features={Feature.CAUSAL: NATIVE, Feature.GROUPED_HEADS: NATIVE},
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        head_dim=Dims(only=(64, 96, 128)),
        smallest_capability=(8, 0),
        rules=(_causal,),
        bound=BOUND,
        exceptions={
            "hidden_changes_nothing": "64 keys, or 128 queries, share the int8 step of their largest number, and the mean that is taken "
            "from the keys is that of all of them: what a row may not see moves how its own numbers are rounded"
        },
    ),
    priority=60,
    missing=needs("sageattention>=1.0.6,<2", "triton", remedy="pip install attnreg-sage[sage]"),
    notes=lambda spec: (
        "copies the keys, which the library would change in place; queries and values too, where their number is no multiple of 128",
        "int8 scores, float16 values; the int8 step is that of the largest number of 64 keys or 128 queries, hidden ones too",
    ),
)


@hookimpl
def attnreg_backends() -> list[Backend]:
    return [sage]
