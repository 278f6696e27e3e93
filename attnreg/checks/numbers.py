"""Whole numbers, one a row, as a list or a tensor gives them."""

from __future__ import annotations

from operator import index
from typing import Any

import torch


def whole_numbers(name: str, given: Any) -> list:
    """The numbers of a list or of an integer tensor, on the host. Nothing is cut off: a fraction or a bool is a TypeError."""
    if isinstance(given, torch.Tensor):
        if given.dtype == torch.bool or given.dtype.is_floating_point or given.dtype.is_complex:
            how = f"; which are True says {name}.nonzero().flatten()" if given.dtype == torch.bool else ""
            raise TypeError(f"{name}: whole numbers, got a tensor of {given.dtype}{how}")
        return given.tolist()
    try:
        if not any(isinstance(n, bool) for n in given):
            return [index(n) for n in given]
    except TypeError:
        pass
    raise TypeError(f"{name}: whole numbers, one a row, as a list or a tensor, got {given!r}")
