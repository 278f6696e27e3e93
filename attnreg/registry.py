"""Every backend there is: built-in ones, and those of plugins, loaded one by one so that a broken one harms nobody else."""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import os
import threading
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pluggy
import torch

from . import hookspecs, policy
from .backend import Backend
from .select import STRICT
from .spec import AttentionSpec

GROUP = "attnreg"


# Where a rank depends on the spec, the order shown is that of a grouped causal prefill on a recent GPU.
_USUAL = AttentionSpec("cuda", (9, 0), torch.bfloat16, 32, 8, 128, 128, causal=True, sizes=(2, 4096, 4096))


class PluginFailure(NamedTuple):
    """A plugin, or one backend of a plugin, that could not be taken."""

    plugin: str
    error: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.plugin}: {self.error}; {self.remedy}"


class PluginError(RuntimeError):
    """A plugin failed to load, under ATTNREG_STRICT_PLUGINS=1."""


class _Registry:
    def __init__(self) -> None:
        self.backends: dict[str, Backend] = {}
        self.origins: dict[str, str] = {}
        self.failures: list[PluginFailure] = []
        self.seconds: dict[str, float] = {}
        self.loaded = self.loading = False
        self.lock = threading.RLock()


_registry = _Registry()


def backends() -> Mapping[str, Backend]:
    """All registered backends by name, in automatic order, whether or not they can run here. Read-only."""
    load()
    ordered = sorted(_registry.backends.values(), key=lambda b: -b.rank(_USUAL))
    return types.MappingProxyType({b.name: b for b in ordered})


def by_name(name: str) -> Backend:
    """The backend of a name that is known to be registered. Traceable by the compiler."""
    return _registry.backends[name]


def failures() -> tuple[PluginFailure, ...]:
    """Plugins that failed to load, and why."""
    load()
    return tuple(_registry.failures)


def origin(name: str) -> str:
    """Who brought a backend: "attnreg", a distribution's name, or "register()"."""
    return _registry.origins.get(name, "")


def import_seconds() -> Mapping[str, float]:
    """How long each plugin took to import."""
    load()
    return types.MappingProxyType(_registry.seconds)


def register(backend: Backend, *, override: bool = False) -> None:
    """Adds a backend to this process. An installed plugin does the same for every process (`hookspecs.attnreg_backends`).

    Raises ValueError when the name is taken, unless `override`.
    """
    load()
    if not isinstance(backend, Backend):
        raise TypeError(f"backend: an attnreg.Backend, got {type(backend).__name__}")
    _add(backend, "register()", override=override)
    policy.changed()


def unregister(name: str) -> None:
    """Takes a backend out of this process. Raises LookupError when there is none of that name."""
    load()
    check_name(name, "name", families=False)
    _registry.backends = {other: b for other, b in _registry.backends.items() if other != name}
    _registry.origins.pop(name, None)
    policy.changed()


@contextlib.contextmanager
def standing_in(backend: Backend) -> Iterator[None]:
    """A backend registered for a while, in the place of one of its name, which is then back as who brought it."""
    before, origin_before = backends().get(backend.name), origin(backend.name)
    register(backend, override=True)
    try:
        yield
    finally:
        unregister(backend.name)
        if before is not None:
            _add(before, origin_before)
            policy.changed()


def check_name(name: str, argument: str, *, families: bool = True) -> None:
    """LookupError with the known names, the nearest one, and the plugins that failed, unless somebody registered `name`."""
    load()
    known = set(_registry.backends)
    if families:
        known |= {b.family for b in _registry.backends.values() if b.family} | {"auto"}
    if name in known:
        return
    near = difflib.get_close_matches(name, known, 1)
    text = f"{argument}: no backend is called {name!r}"
    members = sorted(b.name for b in _registry.backends.values() if b.family == name)
    if members:
        raise LookupError(f"{argument}: {name!r} is a family; here one of {', '.join(members)}")
    text += f"; did you mean {near[0]!r}?" if near else "."
    text += f" Known: {', '.join(sorted(known))}."
    if _registry.failures:
        text += " Plugins that failed to load: " + "; ".join(map(str, _registry.failures))
    raise LookupError(text)


def load() -> None:
    """Loads built-in backends and plugins, once."""
    if _registry.loaded:
        return
    with _registry.lock:
        # Other threads wait here until all is loaded. A plugin that calls attnreg while it is imported sees what is there so far.
        if _registry.loaded or _registry.loading:
            return
        _registry.loading = True
        try:
            _load_all()
        except BaseException:
            _registry.backends, _registry.origins, _registry.failures = {}, {}, []
            raise
        finally:
            _registry.loading = False
        _registry.loaded = True
    policy.changed()


def _load_all() -> None:
    from . import kernels as builtin

    manager = pluggy.PluginManager("attnreg")
    manager.add_hookspecs(hookspecs)
    _take(manager, builtin, "attnreg")
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: e.name):
        source = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.name
        start = time.perf_counter()
        try:
            plugin = entry.load()
        except BaseException as error:  # a plugin may raise anything, SystemExit included
            if isinstance(error, KeyboardInterrupt):
                raise
            _failed(source, f"import of {entry.value} raised {_describe(error)}", "repair or uninstall it", error)
            continue
        finally:
            _registry.seconds[source] = time.perf_counter() - start
        _take(manager, plugin, source)


def _take(manager: pluggy.PluginManager, plugin: Any, source: str) -> None:
    """Registers one plugin and asks it, alone, for its backends."""
    hooks = [n for n in dir(plugin) if manager.parse_hookimpl_opts(plugin, n) is not None]
    known = [n for n in dir(hookspecs) if manager.parse_hookspec_opts(hookspecs, n) is not None]
    for name in hooks:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            _failed(
                source,
                f"implements the unknown hook {name!r}",
                f"did you mean {near[0]!r}?" if near else f"the hooks are {', '.join(known)}",
            )
    if not set(hooks) & set(known):
        if not hooks:
            _failed(source, f"{getattr(plugin, '__name__', plugin)!r} implements no hook", f"decorate {known[0]} with @attnreg.hookimpl")
        return
    try:
        manager.register(plugin, name=source)
        others = [p for p in manager.get_plugins() if p is not plugin]
        answers = manager.subset_hook_caller("attnreg_backends", remove_plugins=others)()
        offered = [b for answer in answers for b in answer]
    except Exception as error:
        _failed(source, f"its hook raised {_describe(error)}", "repair or uninstall it", error)
        return
    for backend in offered:
        try:
            if not isinstance(backend, Backend):
                raise TypeError(f"attnreg_backends returned {backend!r}, which is no attnreg.Backend")
            _add(backend, source)
        except Exception as error:
            _failed(source, _describe(error), "this backend is left out; the plugin's others are not", error)


def _add(backend: Backend, source: str, *, override: bool = False) -> None:
    # What is malformed shows here, not in a user's call.
    backend.claims  # noqa: B018
    rank = backend.rank(_USUAL)
    if isinstance(rank, bool) or not isinstance(rank, (int, float)):
        raise TypeError(f"priority of backend {backend.name!r}: a number, or a function of the spec that returns one, got {rank!r}")
    taken = _registry.backends.get(backend.name)
    if taken is not None and not override:
        raise ValueError(
            f"name {backend.name!r} of {source} is taken by {_registry.origins[backend.name]}; rename it, or register(backend, override=True)"
        )
    families = {b.family for b in _registry.backends.values() if b.family}
    if backend.name in families | {backend.family} or (backend.family and backend.family in _registry.backends):
        raise ValueError(f"name {backend.name!r} (family {backend.family!r}) of {source}: a name can't be a backend and a family at once")
    # A new dictionary, since another thread may be going through the old one.
    _registry.backends = {**_registry.backends, backend.name: backend}
    _registry.origins[backend.name] = source


def _failed(source: str, error: str, remedy: str, cause: BaseException | None = None) -> None:
    failure = PluginFailure(source, error, remedy)
    if os.environ.get(STRICT) == "1":
        raise PluginError(str(failure)) from cause
    _registry.failures.append(failure)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
