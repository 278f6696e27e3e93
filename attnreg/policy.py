"""Who may run: `backend=` over `using(...)` over `use(...)` over the environment over the automatic order."""

from __future__ import annotations

import contextlib
import contextvars
import fnmatch
import functools
import os
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from types import NoneType
from typing import NamedTuple

from .spec import Feature

ENVIRONMENT = "ATTNREG_BACKEND"
MODES = {Feature.DETERMINISTIC.value: Feature.DETERMINISTIC, Feature.BATCH_INVARIANT.value: Feature.BATCH_INVARIANT}
PERMITS = ("approximate",)

Names = str | Sequence[str]


class Policy(NamedTuple):
    """What is in force for one call: an ordered list of names, and the modes asked for."""

    order: tuple[str, ...] = ("auto",)
    source: str = "automatic"
    require: frozenset[Feature] = frozenset()
    allow: frozenset[str] = frozenset()
    expected: tuple[str, ...] | None = None


class Scope(NamedTuple):
    """What the `using` and `expect` blocks around a call add up to."""

    order: tuple[str, ...] | None = None
    require: frozenset[Feature] = frozenset()
    allow: frozenset[str] = frozenset()
    expected: tuple[str, ...] | None = None


class _Process:
    """What `use` has set. `epoch` changes with every change that could change a choice; compiled code guards on it."""

    def __init__(self) -> None:
        self.epoch = 0
        self.order: tuple[str, ...] | None = None
        self.layers: dict[str, tuple[str, ...]] = {}


class _Mirror(threading.local):
    """The scope in force as a number: the compiler can guard on a thread-local attribute, not on a context variable."""

    def __init__(self) -> None:
        # On the instance, in each thread: the compiler's guard on a class's attribute does not see one that is set later.
        self.scope = 0


process = _Process()
mirror = _Mirror()
current_scope: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("attnreg_scope", default=None)
_scopes: list[Scope | None] = [None]
_listeners: list = []


def changed() -> None:
    """Makes every remembered choice be made anew."""
    process.epoch += 1
    _environment.cache_clear()
    for forget in _listeners:
        forget()


def on_change(forget) -> None:
    _listeners.append(forget)


def names(given: Names, argument: str = "backend") -> tuple[str, ...]:
    """A name or an ordered list of names, as a tuple; LookupError for one that nobody registered."""
    listed = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, (list, tuple)) else None
    if listed is None or not all(isinstance(name, str) for name in listed):
        raise TypeError(f"{argument}: a backend's name or a list of names in order, got {given!r}")
    if not listed:
        raise ValueError(f"{argument}: at least one name, got an empty list; 'auto' is the automatic order")
    from . import registry

    for name in listed:
        registry.check_name(name, argument)
    return listed


def use(backend: Names | None, *, layers: str | None = None) -> None:
    """Sets the backend of this process: a name, an ordered list, or "auto"; None takes the setting back.

    layers: only for calls whose `layer` matches this pattern, as in "model.layers.[0-3].*" (fnmatch). Where several match, the one
    with the most literal characters wins.
    Raises LookupError for an unknown name, at once.
    """
    if not isinstance(layers, (str, NoneType)):
        raise TypeError(f"layers: a pattern that layers' names match, as in 'model.layers.[0-3].*', or None for all calls, got {layers!r}")
    order = None if backend is None else names(backend)
    if layers is None:
        process.order = order
    else:
        # A new dictionary, the latest pattern last, since another thread may be going through the old one.
        others = {pattern: listed for pattern, listed in process.layers.items() if pattern != layers}
        process.layers = others if order is None else {**others, layers: order}
    changed()


@contextlib.contextmanager
def using(backend: Names | None = None, *, require: Collection[str] = (), allow: Collection[str] = ()) -> Iterator[None]:
    """Sets the backend inside this block, for this thread or asyncio task only.

    require: modes that the backend must claim: "deterministic", "batch_invariant".
    allow: what automatic choice may take although it is left out by default: "approximate".
    Blocks nest: an inner one without a backend keeps the outer one's; modes add up.

    Code under torch.compile can only look at its thread: it sees the block that was last entered or left there. So a task that awaits
    between `using` and a compiled function may find another task's block in force, and a block around `asyncio.to_thread` does not reach
    into that thread. Enter the block right around the compiled function, where nothing is awaited, or name the backend in the call. While
    a function is being compiled, a block that differs is a RuntimeError.
    """
    for argument, given, known in (("require", require, MODES), ("allow", allow, PERMITS)):
        if isinstance(given, str):
            raise TypeError(f"{argument}: a set of words, got the string {given!r}; write {{{given!r}}}")
        if not isinstance(given, Collection):
            raise TypeError(f"{argument}: a set of words among {', '.join(known)}, got {given!r}")
        for word in given:
            if word not in known:
                raise ValueError(f"{argument}: among {', '.join(known)}, got {word!r}")
    outer = current_scope.get() or Scope()
    yield from _inside(
        outer._replace(
            order=outer.order if backend is None else names(backend),
            require=outer.require | {MODES[word] for word in require},
            allow=outer.allow | set(allow),
        )
    )


@contextlib.contextmanager
def expect(backend: Names) -> Iterator[None]:
    """Fails, with an AssertionError that explains the choice, if a call inside this block would run on anything else.

    It changes no choice. A family counts as any of its members.
    """
    outer = current_scope.get() or Scope()
    yield from _inside(outer._replace(expected=names(backend)))


def _inside(scope: Scope) -> Iterator[None]:
    if scope not in _scopes:
        _scopes.append(scope)
    token = current_scope.set(scope)
    mirror.scope = _scopes.index(scope)
    try:
        yield
    finally:
        current_scope.reset(token)
        # What is in force now, not what was before: blocks of asyncio tasks need not end in the order in which they began.
        mirror.scope = _scopes.index(current_scope.get())


def scope_of(number: int) -> Scope | None:
    return _scopes[number]


@functools.lru_cache(maxsize=1)
def _environment() -> str:
    """Read once, and again after a change of the policy: choices are remembered, and one process must not have two answers."""
    return os.environ.get(ENVIRONMENT, "").strip()


def in_force(backend: Names | None, layer: str | None, scope: Scope | None) -> Policy:
    """The policy for one call, and where it came from."""
    scope = scope or Scope()
    modes = {"require": scope.require, "allow": scope.allow, "expected": scope.expected}
    if backend is not None:
        return Policy(names(backend), "backend= of this call", **modes)
    if scope.order is not None:
        return Policy(scope.order, "using(...) around this call", **modes)
    if layer is not None:
        layers = process.layers
        matching = [pattern for pattern in layers if fnmatch.fnmatchcase(layer, pattern)]
        if matching:
            # max keeps the first of equals, so the latest comes first.
            best = max(reversed(matching), key=lambda pattern: len(re.sub(r"\[.[^]]*\]|[*?]", "", pattern)))
            return Policy(layers[best], f"use(..., layers={best!r})", **modes)
    if process.order is not None:
        return Policy(process.order, "use(...) for this process", **modes)
    if written := _environment():
        listed = tuple(name.strip() for name in written.split(",") if name.strip())
        return Policy(names(listed, ENVIRONMENT), f"environment {ENVIRONMENT}", **modes)
    return Policy(**modes)
