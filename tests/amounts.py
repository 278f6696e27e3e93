"""How much runs: one case of each kind always, the rest when ATTNREG_THOROUGH=1 asks for it (conftest.py skips it otherwise)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def always(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters of a test: the quick ones run always, all others are marked thorough."""
    values = list(values)
    assert set(quick) <= set(values), f"not among the values: {set(quick) - set(values)}"
    return [value if value in quick else pytest.param(value, marks=pytest.mark.thorough) for value in values]
