"""The hook by which backends arrive. Built-in backends use the same door."""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from .backend import Backend

hookspec = pluggy.HookspecMarker("attnreg")
hookimpl = pluggy.HookimplMarker("attnreg")


@hookspec
def attnreg_backends() -> Sequence[Backend]:
    """Returns the backends that this plugin offers.

    Called once, when attnreg is first asked for a backend. Keep it cheap: import kernel libraries inside `run` and `missing`, never
    here, and report an absent library through `missing` rather than by returning nothing.
    """
    raise NotImplementedError
