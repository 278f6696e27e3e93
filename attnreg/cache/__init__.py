"""KV caches: one file each. Cached in steps of any sizes equals one shot."""

from .dynamic import DynamicCache
from .layers import Cache
from .protocol import LayerCache, Step
from .static import StaticCache

__all__ = ["Cache", "DynamicCache", "LayerCache", "StaticCache", "Step"]
