"""The built-in backends, which arrive by the same hook as anybody's."""

from __future__ import annotations

from collections.abc import Sequence

from ..backend import Backend
from ..hookspecs import hookimpl


@hookimpl
def attnreg_backends() -> Sequence[Backend]:
    from .cudnn import cudnn
    from .flex import flex
    from .reference import reference
    from .sdpa import sdpa
    from .varlen import varlen
    from .xformers import xformers

    return [cudnn, varlen, sdpa, xformers, flex, reference]
