"""What was found by looking at a tensor's values, which costs a copy to the host: kept while the tensor lives and is not changed."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

import torch

Answer = TypeVar("Answer")


_TRACERS = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY


def traced(tensor: torch.Tensor) -> bool:
    """Whether there are no values, or a tracer writes down what is done with them: torch.compile, torch.export, make_fx, FakeTensorMode."""
    if torch.compiler.is_compiling() or any(torch._C._get_dispatch_mode(tracer) is not None for tracer in _TRACERS):
        return True
    return tensor.device.type == "meta" or isinstance(tensor, torch._subclasses.FakeTensor)


def readable(tensor: torch.Tensor) -> bool:
    """Whether the host may look at a tensor's values: not while it is traced, nor while a CUDA graph is captured."""
    return not traced(tensor) and not (tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def transforming() -> bool:
    """Whether this is inside of torch.func's grad, vmap or functionalize, where new tensors are wrapped: none of them may be kept."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


class Looked(Generic[Answer]):
    """Answers by tensor. A reference tells a tensor from a later one of the same id; torch's own dictionary with weak keys takes five times
    as long, once a layer. An answer must not keep its tensor alive. What NumPy writes into a tensor's memory changes no version."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], int, Answer]] = {}

    def get(self, tensor: Any) -> Answer | None:
        found = self._found.get(id(tensor))
        return found[2] if found is not None and found[0]() is tensor and found[1] == tensor._version else None

    def keep(self, tensor: torch.Tensor, answer: Answer) -> None:
        """Not for tensors made under inference_mode: those count no versions, so a change in place could not be seen."""
        if not tensor.is_inference():
            number = id(tensor)
            self._found[number] = (weakref.ref(tensor, lambda _: self._found.pop(number, None)), tensor._version, answer)
