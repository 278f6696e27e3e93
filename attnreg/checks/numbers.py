"""Whole numbers: one, or one a row as a list or a tensor gives them. Nothing is cut off: a fraction or a bool is a TypeError."""

from __future__ import annotations

from operator import index
from typing import Any

import torch


def whole_number(name: str, given: Any, least: int | None = 0) -> int:
    """A count or a size."""
    try:
        number = None if isinstance(given, (bool, torch.Tensor)) else index(given)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name}: a whole number{'' if least is None else f', at least {least}'}, got {given!r}")
    if least is not None and number < least:
        raise ValueError(f"{name}: at least {least}, got {number}")
    return number


def whole_tensor(name: str, given: torch.Tensor) -> torch.Tensor:
    """A tensor of such numbers, wherever it is, as (n,); its values are not read."""
    if given.dtype == torch.bool or given.dtype.is_floating_point or given.dtype.is_complex:
        how = f"; which are True says {name}.nonzero().flatten()" if given.dtype == torch.bool else ""
        raise TypeError(f"{name}: whole numbers, got a tensor of {given.dtype}{how}")
    if given.dim() > 1:
        raise ValueError(f"{name}: one dimension, a number a row, got shape {tuple(given.shape)}")
    return given.reshape(-1)


def whole_numbers(name: str, given: Any) -> list[int]:
    """The numbers of a list or of an integer tensor, on the host."""
    if isinstance(given, torch.Tensor):
        return whole_tensor(name, given).tolist()
    try:
        if not any(isinstance(n, bool) for n in given):
            return [index(n) for n in given]
    except TypeError:
        pass
    raise TypeError(f"{name}: whole numbers, one a row, as a list or a tensor, got {given!r}")
