"""Proof that a model's attention arrives here: some families never call the host's attention interface, without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...select import Selection
from . import attention


def check(model: torch.nn.Module, inputs: Mapping[str, Any]) -> dict[str, Selection]:
    """Runs `model(**inputs)` once, without gradients, and returns what ran in each layer, by layer name.

    Raises RuntimeError when no attention call arrived, because the model was not switched to attnreg or never calls the interface.
    """
    arrived: dict[str, Selection] = {}
    with torch.no_grad(), attention.recording(arrived):
        model(**inputs)
    if not arrived:
        config = getattr(model, "config", None)
        chosen = getattr(config, "_attn_implementation", None)
        raise RuntimeError(
            f"no attention call of {type(model).__name__} arrived at attnreg: its attention implementation is {chosen!r}. "
            "Either it was not switched (register(), then model.set_attn_implementation('attnreg')), or this family runs attention code of "
            "its own and never calls transformers' attention interface, as Bloom, MPT and Falcon do; then attnreg can't reach it"
        )
    return arrived
