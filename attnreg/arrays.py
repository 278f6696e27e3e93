"""Arrays of other frameworks, shared with torch by DLPack and handed back as the kind they were.

Nothing is imported: an array names its own namespace (the array API standard's `__array_namespace__`), or its package, which made it,
is loaded already. What DLPack can share is not copied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_ARRAYS = (
    "query", "key", "value", "query_mask", "key_mask", "mask", "bias", "key_lengths", "query_lengths", "key_starts", "alibi_slopes", "sinks",
)  # fmt: skip


class Kind(NamedTuple):
    """What is known of a type of arrays, once one of them was seen: a call of few tokens takes less time than asking again."""

    name: str
    """The framework's."""
    namespace: Any
    has_strides: bool
    is_masked: bool


_kinds: dict[type, Kind] = {}


def foreign(query: Any) -> bool:
    """Whether this is an array of another framework that speaks DLPack."""
    return not isinstance(query, torch.Tensor) and hasattr(type(query), "__dlpack__")


def attend(attention: Callable, arguments: dict[str, Any]) -> Any:
    """Runs a call whose arrays are not torch's, and returns the output, and the lse with it, as arrays of that kind."""
    query = arguments["query"]
    tensors, kind = as_tensors(arguments)
    result = attention(**tensors)
    return tuple(_returned(t, kind, query) for t in result) if isinstance(result, tuple) else _returned(result, kind, query)


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
    for name in _ARRAYS:
        given = arguments.get(name)
        if given is not None and hasattr(type(given), "__dlpack__"):
            converted[name] = convert(name, given)
    pair = arguments.get("cu_seqlens")
    if isinstance(pair, tuple):
        converted["cu_seqlens"] = tuple(convert(f"cu_seqlens[{n}]", array) for n, array in enumerate(pair))
    return converted, kind


def _kind(name: str, array: Any) -> Kind:
    of = type(array)
    if of not in _kinds:
        _kinds[of] = _found(name, array)
    return _kinds[of]


def _found(name: str, array: Any) -> Kind:
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
    return Kind(root, namespace, hasattr(array, "strides"), hasattr(array, "mask") and hasattr(array, "filled"))


def _shared(name: str, array: Any, kind: Kind) -> torch.Tensor:
    """One array as a tensor, over the same memory where that is possible."""
    if not hasattr(type(array), "__dlpack__"):
        raise TypeError(f"{name}: an array of {kind.name}, as the query is, got {type(array).__name__}")
    own = None if isinstance(array, torch.Tensor) else _kind(name, array)
    if own is None or own.name != kind.name:
        other = "torch" if own is None else own.name
        raise TypeError(f"{name}: an array of {kind.name}, as the query is, got one of {other}; all arrays of a call are of one kind")
    if own.is_masked:
        raise TypeError(
            f"{name}: a plain array; a masked array's mask would be lost: give its .data, and what it hides as a mask= or key_mask="
        )
    if own.has_strides and min(array.strides or (), default=0) < 0:
        array = array.copy()  # torch has no negative strides, and its from_dlpack does not survive them
    try:
        if own.name == "numpy" and array.dtype.kind == "V" and str(array.dtype) == "bfloat16":
            return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)  # a dtype that NumPy's DLPack can't name
        return torch.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{name}: DLPack can't share this array of {kind.name}, dtype {getattr(array, 'dtype', '?')}: {error}") from error


def _returned(tensor: torch.Tensor, kind: Kind, query: Any) -> Any:
    if kind.name == "numpy" and tensor.dtype == torch.bfloat16:
        return kind.namespace.from_dlpack(tensor.view(torch.int16)).view(query.dtype)  # a dtype that NumPy's DLPack can't name
    if not (tensor.is_contiguous() or tensor.transpose(1, 2).is_contiguous()):
        tensor = tensor.contiguous()  # not every framework knows strides
    return kind.namespace.from_dlpack(tensor)
