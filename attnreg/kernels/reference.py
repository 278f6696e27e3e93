"""The formula in float64, a line per term, in the order of the contract. It claims everything and is chosen last."""

from __future__ import annotations

import torch

from ..backend import Backend, Output
from ..call import AttentionCall
from ..capabilities import NATIVE, Capabilities
from ..spec import Feature
from ..visibility import alibi_bias, cleaned, cleaned_bias, real_keys, real_queries, visible
from .lse import NEGATIVE_INFINITY


def run_reference(call: AttentionCall) -> Output:
    """The contract's "Formula" and "Visibility". Memory is that of the float64 scores, (B, Hq, Sq, Sk)."""
    query, key, value = (t.double() for t in (call.query, call.key, call.value))
    queries = real_queries(call)
    query, key, value = cleaned(query, key, value, queries, real_keys(call))
    group = call.query_heads // call.key_heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)

    scores = call.scale * (query @ key.transpose(-1, -2))
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.alibi_slopes is not None:
        scores = scores + alibi_bias(call, torch.float64)
    if call.bias is not None:
        scores = scores + cleaned_bias(call).double()
    if (seen := visible(call)) is not None:
        scores = scores.masked_fill(~seen, NEGATIVE_INFINITY)

    largest = scores.detach().amax(-1, keepdim=True)
    if call.sinks is not None:
        sinks = call.sinks.double()[None, :, None, None]
        largest = torch.maximum(largest, sinks.detach())
    largest = largest.masked_fill(largest == NEGATIVE_INFINITY, 0.0)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    if call.sinks is not None:
        total = total + torch.exp(sinks - largest)
    empty = total == 0
    lse = (largest + torch.log(total.masked_fill(empty, 1.0))).masked_fill(empty, NEGATIVE_INFINITY)
    weights = weights / total.masked_fill(empty, 1.0)
    if call.dropout_p > 0:
        weights = torch.nn.functional.dropout(weights, call.dropout_p)
    output = weights @ value

    if queries is not None:
        output = output.masked_fill(~queries[:, None, :, None], 0.0)
        lse = lse.masked_fill(~queries[:, None, :, None], NEGATIVE_INFINITY)
    output = output.to(call.query.dtype)
    return (output, lse.squeeze(-1).to(torch.promote_types(call.query.dtype, torch.float32))) if call.return_lse else output


reference = Backend(
    name="reference",
    run=run_reference,
    capabilities=Capabilities(
        # Not batch invariant: matmul picks its blocking by the whole shape.
        features={f: NATIVE for f in Feature if f not in (Feature.PAGED, Feature.BATCH_INVARIANT)},
        devices=("cpu", "cuda", "mps", "xpu", "meta"),
        dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    ),
    priority=-100,
    layout="bhsd",
    notes=lambda spec: ("computes in float64 and keeps all scores: slow, and memory grows with Sq * Sk",),
)
