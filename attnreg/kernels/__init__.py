"""The built-in backends, which arrive by the same hook as anybody's."""

from __future__ import annotations

from collections.abc import Sequence

from ..backend import Backend
from ..hookspecs import hookimpl


@hookimpl
def attnreg_backends() -> Sequence[Backend]:
    from .cudnn import cudnn
    from .flash2 import flash2
    from .flash3 import flash3
    from .flash4 import flash4
    from .flex import flex
    from .reference import reference
    from .sdpa import sdpa
    from .varlen import varlen
    from .xformers import xformers

    return [flash4, flash3, flash2, cudnn, varlen, sdpa, xformers, flex, reference]
