"""Whether a kernel library is really there: its installed version, and an import that is tried and may fail.

`find_spec` can't tell: flash-attn and flash-attn-4 share the folder `flash_attn`, and a library built for another torch or CUDA is found
and then can't be loaded. What is wrong comes back as a `Reason` with its remedy; nothing here raises.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from packaging.version import InvalidVersion, Version

from ..capabilities import Reason


class Library(NamedTuple):
    """A kernel library that can be imported."""

    distribution: str
    version: str
    module: Any


def find(distributions: Sequence[str], modules: Sequence[str], install: str, oldest: str | None = None) -> Library | Reason:
    """The first of `modules` that can be imported, of the first of `distributions` that is installed; else what is wrong.

    install: the command that would help. oldest: versions below it are refused before anything is imported.
    """
    for name in distributions:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        break
    else:
        return Reason("missing", distributions[0], _nobody(modules[0]), install)
    if torch.version.hip is not None:
        # Of its own name there, but another library: the port of flash-attn 2 takes windows and soft caps, and leaves them out.
        return Reason("missing", f"{name} for CUDA", f"torch {torch.__version__} for ROCm", "sdpa, flex and reference run there")
    try:
        old = oldest is not None and Version(version) < Version(oldest)
    except InvalidVersion:
        return Reason("missing", name, f"{name} has the unreadable version {version!r}", install)
    if old:
        return Reason("missing", f"{name} >= {oldest}", f"{name} {version}", install)
    errors = []
    for module in modules:
        try:
            return Library(name, version, importlib.import_module(module))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a broken extension may raise anything: ImportError, OSError, RuntimeError, SystemExit
            errors.append(f"{type(error).__name__}: {error}")
    return Reason("missing", f"a {name} that can be imported", f"{name} {version} fails: {'; '.join(errors)}", f"reinstall it: {install}")


def whole(library: Library | Reason, functions: Sequence[str], install: str) -> Library | Reason:
    """The library, if its module has all of these functions; else half of it is there, or one that is too old."""
    if not isinstance(library, Library):
        return library
    name, version, module = library
    lacking = [function for function in functions if not callable(getattr(module, function, None))]
    if not lacking:
        return library
    return Reason(
        "missing",
        f"the whole of {name}",
        f"half of {name} {version}: {module.__name__} has no {', '.join(lacking)}",
        f"reinstall it: {install}",
    )


def without_parent(library: Library | Reason, module: str) -> Library | Reason:
    """Once more, where the only fault is the `__init__` of a folder that another, broken library brought.

    The parent package is then entered without running it. It stays so: whoever asks it for a name gets an AttributeError, which
    `from flash_attn import ...` turns into the ImportError that it would have met.
    """
    if not isinstance(library, Reason) or torch.version.hip is not None:
        return library
    parent = module.partition(".")[0]
    if parent in sys.modules:
        return library
    try:
        found = importlib.util.find_spec(parent)
    except (ImportError, ValueError):
        return library
    if found is None or not found.submodule_search_locations or not found.origin:
        return library
    package = types.ModuleType(parent, f"The folder {parent}, whose own __init__ fails to import.")
    package.__path__, package.__spec__, package.__file__ = list(found.submodule_search_locations), found, found.origin
    sys.modules[parent] = package
    name = next((d for d in importlib.metadata.packages_distributions().get(parent, ()) if d == "flash-attn-4"), None)
    try:
        if name is None:
            raise ImportError(f"{module} belongs to no installed distribution")
        return Library(name, importlib.metadata.version(name), importlib.import_module(module))
    except KeyboardInterrupt:
        raise
    except BaseException:
        for loaded in [m for m in sys.modules if m == parent or m.startswith(f"{parent}.")]:
            del sys.modules[loaded]
        return library


def _nobody(module: str) -> str:
    parent = module.partition(".")[0]
    try:
        if importlib.util.find_spec(parent) is None:  # the usual answer; whose a folder is takes a look at every distribution
            return "not installed"
    except ValueError:  # a module without a spec
        pass
    owners = importlib.metadata.packages_distributions().get(parent, ())
    return f"not installed; the folder {parent} belongs to {', '.join(sorted(set(owners)))}" if owners else "not installed"
