"""transformers as a host: `register()`, then `attn_implementation="attnreg"` or `model.set_attn_implementation("attnreg")`.

Padding stays a padding mask, causality stays `causal`, a sliding window stays `window`: the host's mask function hands over what it
was told (`masks.HostMask`) in place of a dense mask, and only patterns that no option can say become one.
"""

from __future__ import annotations

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ... import policy
from .attention import attention_function
from .cache import cache
from .check import check
from .layers import name_layers
from .masks import HostMask, host_mask

__all__ = ["HostMask", "cache", "check", "name_layers", "register"]

_TRAPS = {
    "flash": "transformers loads its own flash kernels for every name with 'flash' in it",
    "sdpa": "transformers refuses names with 'sdpa' in them for models that don't support its sdpa",
    "flex_attention": "transformers refuses names with 'flex_attention' in them for models that don't support its flex attention",
    "/": "transformers reads a name with a slash as a kernel to download",
}
_ours: set[str] = set()


def register(name: str = "attnreg", backend: policy.Names | None = None) -> None:
    """Makes `name` an attention implementation of transformers: the attention function and the mask function, both.

    name: what to write as `attn_implementation`; several names with different backends can stand side by side.
    backend: a backend's name or an ordered list, for every call under this name; by default the policy in force decides.
    Raises ValueError for a name that transformers would take for something else, LookupError for an unknown backend.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name: a word to write as attn_implementation, got {name!r}")
    for trap, why in _TRAPS.items():
        if trap in name:
            raise ValueError(f"name: {name!r} contains {trap!r}: {why}; choose another, such as 'attnreg_fa'")
    if name.startswith("paged|"):
        raise ValueError(f"name: {name!r}: transformers strips the prefix 'paged|' and looks for the rest; choose a name without it")
    if name not in _ours and (name in AttentionInterface._global_mapping or name in AttentionMaskInterface._global_mapping):
        raise ValueError(f"name: {name!r} is an attention implementation of transformers itself; choose another")
    if backend is not None:
        policy.names(backend)
    AttentionInterface.register(name, attention_function(backend))
    AttentionMaskInterface.register(name, host_mask)
    _ours.add(name)
