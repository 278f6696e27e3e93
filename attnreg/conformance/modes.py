"""Checks that draw no case: dropout's statistics, the public call, the compiler, CUDA graphs, hidden syncs."""

from __future__ import annotations

from collections.abc import Callable

from ..backend import Backend
from .trial import Tally


class Skipped(Exception):
    """A check that can't be made here, and why."""


def checks_for(backend: Backend, device: str, compiler: str) -> list[tuple[str, Callable[[Tally], None]]]:
    return []
