"""KV caches: one file each. Cached in steps of any sizes equals one shot."""

from .dynamic import DynamicCache
from .layers import Cache
from .layouts import from_transformers, to_transformers
from .paged import PagedCache
from .protocol import LayerCache, Step
from .sliding import SlidingCache
from .static import StaticCache

__all__ = [
    "Cache",
    "DynamicCache",
    "LayerCache",
    "PagedCache",
    "SlidingCache",
    "StaticCache",
    "Step",
    "from_transformers",
    "to_transformers",
]
