"""What every backend that has a log-sum-exp does with it."""

from __future__ import annotations

import torch

NEGATIVE_INFINITY = float("-inf")


def with_empty_rows(lse: torch.Tensor) -> torch.Tensor:
    """flash-attn's kernels write +inf for a row that sees nothing; the contract has -inf."""
    return lse.masked_fill(lse == float("inf"), NEGATIVE_INFINITY)


def beside_sinks(lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The share of the weight that keys keep beside the sinks, exp(lse) / (exp(lse) + exp(sink)), and the lse with the sinks in it.

    lse (B, Hq, Sq), sinks (Hq,); both results (B, Hq, Sq). An empty row keeps nothing, beside a sink of -inf too.
    """
    sinks = sinks.to(lse.dtype)[None, :, None]
    share = torch.sigmoid((lse - sinks).masked_fill(lse == NEGATIVE_INFINITY, NEGATIVE_INFINITY))
    return share, torch.logaddexp(lse, sinks.expand_as(lse))
