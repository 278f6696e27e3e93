"""The second step of a call: its selection, made once for each spec and policy; and the same while the compiler traces."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import policy, registry
from .backend import Backend
from .call import AttentionCall
from .select import NoBackendError, Selection, select
from .spec import Feature, spec_from

LIMIT = 4096
"""How many selections are remembered before all are forgotten."""
_selections: dict[tuple, Selection] = {}


def choose(
    call: AttentionCall, backend: policy.Names | None, layer: str | None, scope: policy.Scope | None, *, must: bool = True
) -> Selection:
    """The selection for a checked call; made once for each spec and policy. With `must`, raises `NoBackendError` when there is none."""
    registry.load()
    if scope is not None and Feature.DETERMINISTIC in scope.require and not call.deterministic:
        call.deterministic, call._spec = True, None  # kernels are to run in that mode, not only to be able to
    named = backend if backend is None or isinstance(backend, str) else policy.names(backend)
    if _wants_forms(call) and _somebody_packs(call, policy.in_force(named, layer, scope)):
        call.examine_padding()
    if call.spec.huge_bias and call.huge_bias is None:
        call.examine_bias()
    question = (call.spec, named, layer, scope)
    selections = _selections
    selection = selections.get(question)
    if selection is None:
        selection = select(call.spec, registry.backends().values(), policy.in_force(named, layer, scope), registry.failures())
        if len(selections) >= LIMIT:
            selections.clear()
        selections[question] = selection
    if must:
        _check_selection(selection, scope)
    return selection


def choose_while_tracing(call: AttentionCall, backend: policy.Names | None, layer: str | None) -> Backend:
    """The chosen backend as a constant of the graph, guarded by the policy's epoch and scope."""
    if policy.mirror.scope and _must_be_deterministic(policy.mirror.scope):
        call.deterministic = True
    named = backend if backend is None or isinstance(backend, str) else policy.names(backend)
    return registry.by_name(_chosen_while_tracing(call.facts(), named, layer, policy.process.epoch, policy.mirror.scope))


def _chosen_while_tracing(facts: tuple, backend: Any, layer: str | None, epoch: int, scope: int) -> str:
    """The chosen backend's name. Runs at trace time, as ordinary Python; in a thread of its own, because loading a plugin or asking a
    library what it can do must not happen under the tracer's fake tensors, which are thread-local."""
    around = policy.scope_of(scope)
    if around != policy.current_scope.get():
        raise RuntimeError(
            f"using(...): this task's block is {policy.current_scope.get()}, but compiled code would see {around}, the last one entered or left "
            "in this thread; enter the block right around the compiled function, with no await between, or give backend= in the call"
        )

    def work() -> str:
        registry.load()
        selection = select(spec_from(facts), registry.backends().values(), policy.in_force(backend, layer, around), registry.failures())
        _check_selection(selection, around)
        return selection.chosen.name

    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(work).result()


def _must_be_deterministic(scope: int) -> bool:
    return Feature.DETERMINISTIC in policy.scope_of(scope).require


# What torch.compiler.assume_constant_result sets; that function would import the whole compiler here. The epoch and the scope's number are
# read, and so guarded, by the traced code above.
_chosen_while_tracing._dynamo_marked_constant = True
_must_be_deterministic._dynamo_marked_constant = True


def _check_selection(selection: Selection, scope: policy.Scope | None) -> None:
    if selection.chosen is None:
        raise NoBackendError(selection)
    if scope is not None and scope.expected is not None:
        chosen = selection.chosen
        if chosen.name not in scope.expected and chosen.family not in scope.expected:
            raise AssertionError(f"expected {' or '.join(scope.expected)}, but {chosen.name} would run\n{selection}")


def _wants_forms(call: AttentionCall) -> bool:
    """Whether a padding mask's form is not known yet."""
    return (call.query_mask is not None and call.query_padding is None) or (call.key_mask is not None and call.key_padding is None)


def _somebody_packs(call: AttentionCall, chosen_by: policy.Policy) -> bool:
    for backend in registry.backends().values():
        named = "auto" in chosen_by.order or backend.name in chosen_by.order or backend.family in chosen_by.order
        if backend.packs and named and backend.reason_missing is None and call.device.type in backend.claims.devices:
            return True
    return False


def _forget() -> None:
    # A new dictionary, so that a choice made under the old policy, in another thread, lands in the old one.
    global _selections
    _selections = {}


policy.on_change(_forget)
