"""Arrays of other frameworks, shared with torch by DLPack and handed back as the kind they were.

Nothing is imported: an array names its own namespace (the array API standard's `__array_namespace__`), or its package, which made it,
is loaded already. What DLPack can share is not copied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_OPTIONS = ("query_mask", "key_mask", "mask", "bias", "key_lengths", "query_lengths", "key_starts", "alibi_slopes", "sinks")


class Kind(NamedTuple):
    """A framework's arrays, as the query shows them."""

    name: str
    namespace: Any
    dtype: Any
    """The query's, which outputs get back where DLPack has no word for it."""


def foreign(query: Any) -> bool:
    """Whether this is an array of another framework that speaks DLPack."""
    return not isinstance(query, torch.Tensor) and hasattr(type(query), "__dlpack__")


def attend(attention: Callable, arguments: dict[str, Any]) -> Any:
    """Runs a call whose arrays are not torch's, and returns the output, and the lse with it, as arrays of that kind."""
    tensors, kind = as_tensors(arguments)
    result = attention(**tensors)
    return tuple(_returned(t, kind) for t in result) if isinstance(result, tuple) else _returned(result, kind)


def as_tensors(arguments: dict[str, Any]) -> tuple[dict[str, Any], Kind]:
    """The same arguments with every array as a tensor on its device, and the kind they all were.

    Lists of numbers and `Padding` are left as they are. Raises TypeError when kinds are mixed, or when DLPack can't share an array.
    """
    kind = _kind("query", arguments["query"])
    shared: dict[int, torch.Tensor] = {}  # the same array twice stays one tensor: cu_seqlens and masks are compared by identity

    def convert(name: str, array: Any) -> torch.Tensor:
        if id(array) not in shared:
            shared[id(array)] = _shared(name, array, kind)
        return shared[id(array)]

    converted = dict(arguments)
    for name in ("query", "key", "value", *_OPTIONS):
        given = arguments.get(name)
        if hasattr(type(given), "__dlpack__"):
            converted[name] = convert(name, given)
    pair = arguments.get("cu_seqlens")
    if isinstance(pair, tuple):
        converted["cu_seqlens"] = tuple(convert(f"cu_seqlens[{n}]", array) for n, array in enumerate(pair))
    return converted, kind


def _kind(name: str, array: Any) -> Kind:
    root = type(array).__module__.partition(".")[0]
    if any(base.__name__ == "Tracer" and base.__module__.partition(".")[0] == "jax" for base in type(array).__mro__):
        raise TypeError(
            f"{name}: a JAX array of values, got a tracer of jax.grad, jit or vmap. Gradients are torch's: give torch tensors that require "
            "them (torch.from_dlpack), or call attention outside the transformation"
        )
    if hasattr(array, "__array_namespace__"):
        namespace = array.__array_namespace__()
        root = namespace.__name__.partition(".")[0]
    else:
        namespace = sys.modules.get(root)
    if not hasattr(namespace, "from_dlpack"):
        raise TypeError(
            f"{name}: arrays of {root!r} can be read by DLPack, but {root} has no from_dlpack to return one; give torch.from_dlpack({name})"
        )
    return Kind(root, namespace, getattr(array, "dtype", None))


def _shared(name: str, array: Any, kind: Kind) -> torch.Tensor:
    """One array as a tensor, over the same memory where that is possible."""
    if not hasattr(type(array), "__dlpack__"):
        raise TypeError(f"{name}: an array of {kind.name}, as the query is, got {type(array).__name__}")
    other = "torch" if isinstance(array, torch.Tensor) else _kind(name, array).name
    if other != kind.name:
        raise TypeError(f"{name}: an array of {kind.name}, as the query is, got one of {other}; all arrays of a call are of one kind")
    if hasattr(array, "mask") and hasattr(array, "filled"):
        raise TypeError(
            f"{name}: a plain array; a masked array's mask would be lost: give its .data, and what it hides as a mask= or key_mask="
        )
    if any(step < 0 for step in getattr(array, "strides", None) or ()):
        array = array.copy()  # torch has no negative strides, and its from_dlpack does not survive them
    bfloat16 = str(getattr(array, "dtype", "")) == "bfloat16"
    try:
        if bfloat16 and hasattr(array, "view") and kind.name == "numpy":
            return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)  # a dtype that NumPy's DLPack can't name
        return torch.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{name}: DLPack can't share this array of {kind.name}, dtype {getattr(array, 'dtype', '?')}: {error}") from error


def _returned(tensor: torch.Tensor, kind: Kind) -> Any:
    if kind.name == "numpy" and tensor.dtype == torch.bfloat16:
        return kind.namespace.from_dlpack(tensor.view(torch.int16)).view(kind.dtype)
    if not (tensor.is_contiguous() or tensor.transpose(1, 2).is_contiguous()):
        tensor = tensor.contiguous()  # not every framework knows strides
    return kind.namespace.from_dlpack(tensor)
