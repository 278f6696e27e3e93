"""One attention call that means one thing, run by the best kernel that can give exactly that meaning."""

import importlib

from .attention import attention, explain, explain_spec, last_selection
from .backend import Backend, needs
from .cache import DynamicCache, PagedCache, SlidingCache, StaticCache
from .call import AttentionCall, Pages
from .capabilities import EMULATED, NATIVE, Capabilities, Dims, Reason, Support
from .hookspecs import hookimpl
from .packing import Padding
from .policy import expect, use, using
from .registry import backends, register, unregister
from .select import NoBackendError, Selection
from .spec import AttentionSpec, Feature
from .version import __version__

__all__ = [
    "__version__",
    "EMULATED",
    "NATIVE",
    "AttentionCall",
    "AttentionSpec",
    "Backend",
    "Capabilities",
    "Dims",
    "DynamicCache",
    "Feature",
    "NoBackendError",
    "Padding",
    "PagedCache",
    "Pages",
    "Reason",
    "Selection",
    "SlidingCache",
    "StaticCache",
    "Support",
    "attention",
    "backends",
    "expect",
    "explain",
    "explain_spec",
    "hookimpl",
    "last_selection",
    "needs",
    "register",
    "unregister",
    "use",
    "using",
]


def __getattr__(name: str):
    """`attnreg.nn` and `attnreg.conformance`, imported when first asked for."""
    if name in ("nn", "conformance"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
