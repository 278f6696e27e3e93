"""How far from the truth a backend may be: measured against the plain formula in the same dtype, not chosen (contract, "Numbers").

The truth is the reference on the same numbers in float64. The yardstick is the formula as one would write it in the input dtype:
scores and weights in that dtype, softmax in float32. With `eps` of the input dtype, the largest allowed error is

    output, lse:  2 * (yardstick's error) + 8 * eps * (max|value|, for lse max(1, max|lse|))
    gradients:    3 * (yardstick's error) + 8 * eps * (the largest element of the gradient without cancellation)

and, since the truth is itself rounded, 4 * (eps of float64) * max|score| * max|value| more, which only float64 inputs notice.

The yardstick's error alone can be 0 by luck, as where one key takes all the weight; the second term is the floor for that. A gradient
that is 0 because large terms cancel still carries their rounding, so its floor is the gradient's own formula with every product and
every sum taken of absolute values: the size of what was added up. A weight is as wrong, relatively, as its score is absolutely, so that
the floor of gradients also has 2 * (eps of float32, or float64) * max|score| times that size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..backend import Backend
from ..call import AttentionCall
from ..capabilities import NATIVE, Capabilities
from ..spec import Feature
from ..visibility import alibi_bias, cleaned, cleaned_bias, real_keys, real_queries, slots, visible

NEGATIVE_INFINITY = float("-inf")


class Error(NamedTuple):
    """One measured error and what is allowed."""

    error: float
    allowed: float

    @property
    def share(self) -> float:
        """Of the allowed error, how much is used; above 1 is too much."""
        return self.error / self.allowed if self.allowed else (0.0 if self.error == 0 else float("inf"))


def run_plain(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
    """The yardstick: scores and weights in the input dtype, softmax in float32 (float64 for float64)."""
    dtype = call.query.dtype
    wide = torch.promote_types(dtype, torch.float32)
    scores, value, queries = _scores(call)
    hidden = scores == NEGATIVE_INFINITY
    scores = scores.to(wide)
    if call.sinks is not None:
        column = call.sinks.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    empty = (scores == NEGATIVE_INFINITY).all(-1, keepdim=True)
    lse = torch.logsumexp(scores.masked_fill(empty, 0.0), -1).masked_fill(empty[..., 0], NEGATIVE_INFINITY)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1)[..., : hidden.shape[-1]].masked_fill(hidden, 0.0)
    output = weights.to(dtype) @ value
    if queries is not None:
        output = output.masked_fill(~queries[:, None, :, None], 0.0)
        lse = lse.masked_fill(~queries[:, None, :], NEGATIVE_INFINITY)
    return (output, lse) if call.return_lse else output


def _scores(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Masked scores in the input dtype, and value with its heads repeated."""
    dtype, queries = call.query.dtype, real_queries(call)
    query, key, value = cleaned(call.query, call.key, call.value, queries, real_keys(call))
    group = call.query_heads // call.key_heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query @ key.transpose(-1, -2)) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.alibi_slopes is not None:
        scores = scores + alibi_bias(call, torch.promote_types(dtype, torch.float32)).to(dtype)
    if call.bias is not None:
        scores = scores + cleaned_bias(call).to(dtype)
    if (seen := visible(call)) is not None:
        scores = scores.masked_fill(~seen, NEGATIVE_INFINITY)
    return scores, value, queries


def truth_rounding(call: AttentionCall) -> float:
    """How far the truth may itself be off, relatively: a weight is as wrong as its score is in float64. call: in float64."""
    call = call.replaced()
    call.to_layout("bhsd")
    with torch.no_grad():
        return 4 * torch.finfo(torch.float64).eps * largest(_scores(call)[0])


plain = Backend(
    name="plain",
    run=run_plain,
    capabilities=Capabilities(
        features={f: NATIVE for f in Feature if f not in (Feature.PAGED, Feature.DROPOUT)},
        devices=("cpu", "cuda", "mps", "xpu"),
        dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    ),
    layout="bhsd",
)


def largest_difference(got: torch.Tensor, truth: torch.Tensor) -> float:
    """max|got - truth|; infinite where one is NaN or infinite and the other is not the same."""
    got, truth = got.detach().double(), truth.detach().double()
    if got.numel() == 0:
        return 0.0
    difference = torch.where(got == truth, 0.0, (got - truth).abs())
    return float(torch.nan_to_num(difference, nan=float("inf")).max())


def largest(tensor: torch.Tensor) -> float:
    """The largest finite absolute value, 0 for none."""
    return float(torch.nan_to_num(tensor.detach().double(), nan=0.0, posinf=0.0, neginf=0.0).abs().max()) if tensor.numel() else 0.0


def gradient_floors(
    call: AttentionCall, output_gradient: torch.Tensor, lse_gradient: torch.Tensor | None, dtype: torch.dtype
) -> dict[str, float]:
    """For each tensor, the error that its gradient may have where the yardstick has none: the largest element of the gradient when
    nothing cancels, times the rounding of terms and of scores.

    call: in float64. dtype: of the case. output_gradient: (B, Hq, Sq, Dv); lse_gradient: (B, Hq, Sq) or None.
    """
    call = call.replaced()
    call.to_layout("bhsd")
    with torch.no_grad():
        scores, value, queries = _scores(call)
        dout = output_gradient.double().abs()
        if queries is not None:
            dout = dout.masked_fill(~queries[:, None, :, None], 0.0)
        column = scores.new_full((*scores.shape[:3], 1), NEGATIVE_INFINITY)
        if call.sinks is not None:
            column = call.sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.nan_to_num(torch.softmax(torch.cat([scores, column], -1), -1))
        weights, sink_weight = weights[..., :-1], weights[..., -1]
        group = call.query_heads // call.key_heads
        dweights = dout @ value.abs().transpose(-1, -2)
        row = (weights * dweights).sum(-1, keepdim=True)
        lse_row = 0.0 if lse_gradient is None else lse_gradient.double().abs()[..., None]
        dscores = weights * (dweights + row + lse_row)
        query, key, _ = cleaned(call.query, call.key, call.value, queries, real_keys(call))
        by_head = {
            "key": call.scale * dscores.transpose(-1, -2) @ query.abs(),
            "value": weights.transpose(-1, -2) @ dout,
        }
        sizes = {name: largest(t.unflatten(1, (call.key_heads, group)).sum(2)) for name, t in by_head.items()}
        sizes["query"] = largest(call.scale * dscores @ key.repeat_interleave(group, 1).abs())
        if call.bias is not None:
            sizes["bias"] = largest(dscores.sum_to_size(call.bias.shape))
        if call.sinks is not None:
            sizes["sinks"] = largest((sink_weight * (row[..., 0] + (0.0 if lse_gradient is None else lse_row[..., 0]))).sum((0, 2)))
        if call.alibi_slopes is not None:
            j = torch.arange(call.key_length, device=call.device)
            distance = (slots(call)[:, None, :, None] - j).abs().double()
            by_row = (dscores * distance).sum((2, 3))
            sizes["alibi_slopes"] = largest(by_row if call.alibi_slopes.dim() == 2 else by_row.sum(0))
    wide = torch.promote_types(dtype, torch.float32)
    rounding = 8 * torch.finfo(dtype).eps + 2 * torch.finfo(wide).eps * largest(scores)
    return {name: rounding * size for name, size in sizes.items()}
