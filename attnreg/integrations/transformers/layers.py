"""Names of layers, "model.layers.3.self_attn", for policies: `attnreg.use("flash", layers="model.layers.[0-3].*")`.

transformers hands an attention function its module, which does not know its own name. The name is written on the module, where a
copy of the model and the compiler find it again.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import PreTrainedModel

_NAME = "_attnreg_layer"


def name_layers(model: torch.nn.Module) -> None:
    """Gives every module of `model` its qualified name, as the layer of its attention calls.

    The first eager call of a model does this by itself; it is needed before a model whose very first call is compiled.
    """
    for name, module in model.named_modules():
        setattr(module, _NAME, name)


def layer_of(module: torch.nn.Module) -> str | None:
    """The layer name of an attention module. On its first eager call the model around it is found and named."""
    name = getattr(module, _NAME, None)
    if name is not None:
        return name
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "use(..., layers=...) is in force, but the layers of this compiled model have no names yet: call "
            "attnreg.integrations.transformers.name_layers(model) once, before compiling"
        )
    model = _model_around(module)
    if model is not None:
        name_layers(model)
    return getattr(module, _NAME, None)


def _model_around(module: torch.nn.Module) -> torch.nn.Module | None:
    """The outermost transformers model that is running, among those that hold `module`."""
    found: Any = None
    frame = sys._getframe(1)
    while frame is not None:
        running = frame.f_locals.get("self")
        if isinstance(running, PreTrainedModel) and running is not found and any(m is module for m in running.modules()):
            found = running
        frame = frame.f_back
    return found
