"""The public call, in three visible steps: check it (`call`), choose a backend (`select`), run it."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import arrays, policy, registry
from .backend import Backend, Output
from .cache.segments import in_rows
from .call import AttentionCall, spec_from
from .packing import Padding
from .select import NoBackendError, Selection, select
from .spec import AttentionSpec, Feature
from .visibility import real_queries

if TYPE_CHECKING:
    from .cache import LayerCache

MaskLike = torch.Tensor | Padding


class _Plan(NamedTuple):
    """What a repeated call needs: the checked call less its tensors, and what to run."""

    fits: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]
    """Whether query, key and value are as they were: sizes, strides, dtype, device, gradients, autocast."""
    template: dict[str, Any]
    selection: Selection
    run: Callable[[AttentionCall], Output] | None
    """The backend's function, where the result needs no change of layout or shape; else None."""


class _Last(threading.local):
    selection: Selection | None = None


_LIMIT = 4096
_plans: dict[tuple, list[_Plan]] = {}
_selections: dict[tuple, Selection] = {}
_last = _Last()
# Bound once: each look-up of a name in a module costs the repeated call a tenth of a microsecond.
_tracing = torch.compiler.is_dynamo_compiling
_current_scope = policy.current_scope.get
_grad_enabled = torch.is_grad_enabled
_deterministic = torch._C._get_deterministic_algorithms


def attention(
    query: torch.Tensor,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    query_mask: MaskLike | None = None,
    key_mask: MaskLike | None = None,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    key_lengths: torch.Tensor | list[int] | None = None,
    query_lengths: torch.Tensor | list[int] | None = None,
    key_starts: torch.Tensor | list[int] | None = None,
    cu_seqlens: tuple[torch.Tensor, torch.Tensor] | None = None,
    max_seqlens: tuple[int, int] | None = None,
    alibi_slopes: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    finite_padding: bool = False,
    layout: str = "bshd",
    n_heads: int | None = None,
    n_kv_heads: int | None = None,
    cache: LayerCache | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: policy.Names | None = None,
    layer: str | None = None,
) -> Output:
    """Softmax attention with one meaning, run by the best backend that can give exactly that meaning.

    out[b,i,h] = sum_j softmax_j(scale * <query[b,i,h], key[b,j,h//g]>) * value[b,j,h//g], g = Hq / Hkv, over the slots j that query i
    sees; the terms below enter in the order scale, softcap, alibi and bias, masks, sink, softmax, dropout. Query i of row b sits at slot
    p = L_b - Q_b + i (the last query on the last key), where L_b and Q_b are `key_lengths` and `query_lengths`, by default Sk and Sq.

    query: (B, Sq, Hq, D); or flat (B, Sq, Hq*D) with `n_heads`; or packed rows (T, Hq, D) with `cu_seqlens`.
    key, value: (B, Sk, Hkv, D) and (B, Sk, Hkv, Dv), Hq a multiple of Hkv; None with a cache: attend without appending.
    causal: slot j is seen only if j <= p.
    window: (left, right), j from p - left to p + right; None is unlimited; the query's own slot is not counted.
    query_mask: (B, Sq) bool or Padding, True = a real token; sets the outputs of padded rows to 0, changes no visibility.
    key_mask: (B, Sk) bool or Padding, True = a real token that may be seen.
    mask: bool, True = may be seen; 4-D, each dimension that of (B, Hq, Sq, Sk) or 1.
    bias: floating, added to the scores; shape as `mask`; -inf means not seen.
    key_lengths, query_lengths, key_starts: (B,) integers; slots exist from start to length, rows up to length.
    cu_seqlens: (cu_q, cu_k), (segments + 1,) each, for packed rows with B = 1; `max_seqlens` spares a device-to-host copy.
    alibi_slopes: (Hq,) or (B, Hq), subtracts slope * |p - j| (arXiv:2108.12409).
    softcap: scores become softcap * tanh(scores / softcap) (arXiv:2408.00118).
    sinks: (Hq,), adds exp(sink) to the softmax's denominator (arXiv:2309.17453 as a learned logit).
    scale: default 1/sqrt(D) (arXiv:1706.03762).
    dropout_p: in [0, 1), on the weights; the caller passes 0 outside training.
    finite_padding: promises that padding holds no NaN or Inf, which spares its cleaning.
    layout: "bshd", or "bhsd" to give and get (B, H, S, D).
    cache: a layer of a KV cache: key and value are appended, then query attends over the whole.
    return_lse: also return the log-sum-exp of the scores, (B, Hq, Sq) float32 (float64 for float64), -inf where nothing is seen.
    deterministic: the same bits every time, backward too; default torch's own switch.
    backend: a name, a family such as "flash", or an ordered list; no other is used. Default: the policy in force (`use`, `using`).
    layer: the layer's name, for policies and explanations.

    Arrays of other frameworks that speak DLPack (NumPy, JAX, CuPy) are taken too: all of one kind, which the output is; without gradients.

    Returns (B, Sq, Hq, Dv) in the caller's layout, dtype and device; a row that sees nothing is 0. With `return_lse`, (output, lse).
    Raises ValueError or TypeError for a call that makes no sense, LookupError for an unknown backend, and NoBackendError when no allowed
    backend can run it, with every reason.
    """
    if cache is not None and cu_seqlens is not None:
        return in_rows(attention, dict(locals()))
    if _tracing():
        return _traced(dict(locals()))
    scope = _current_scope()
    options = None
    if (
        query_mask is not None
        or key_mask is not None
        or mask is not None
        or bias is not None
        or alibi_slopes is not None
        or sinks is not None
    ):
        options = {"query_mask": query_mask, "key_mask": key_mask, "mask": mask, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    signature = plan = None
    if cache is None and cu_seqlens is None and key_lengths is None and query_lengths is None and key_starts is None:
        try:
            signature = (
                query.shape, key.shape, causal, window, softcap, scale, dropout_p, finite_padding, layout, n_heads, n_kv_heads, return_lse,
                max_seqlens, backend, layer, deterministic, _deterministic(), _grad_enabled(), scope,
                options and tuple(map(_signature, options.values())), query.is_cuda and _on_device(query, key, value),
            )  # fmt: skip
            for known in _plans.get(signature, ()):
                if known.fits(query, key, value):
                    plan = known
                    break
        except (AttributeError, TypeError, RuntimeError):  # not tensors, or not hashable: the checks below say what is wrong, or take it
            signature = None
    if plan is None:
        if arrays.foreign(query):
            return arrays.attend(attention, _arguments(locals()))
        call = _checked(locals())
        selection = choose(call, backend, layer, scope)
        if signature is not None and call.repeatable:
            _remember(signature, query, key, value, call, selection)
        _last.selection = selection
        function = run if cache is None else _appending
        return function(call, selection.chosen, selection.run)
    call = AttentionCall.__new__(AttentionCall)
    state = call.__dict__
    state.update(plan.template)
    state["query"], state["key"], state["value"] = query, key, value
    if options is not None:
        state.update(options)
    _last.selection = plan.selection
    return plan.run(call) if plan.run else run(call, plan.selection.chosen, plan.selection.run)


def _arguments(names: dict[str, Any]) -> dict[str, Any]:
    # Not a comprehension inside `attention`: before Python 3.12 that makes a cell of the traced frame, which the compiler refuses.
    return {name: names[name] for name in ("query", "key", "value", *_OPTIONS)}


def explain(query: torch.Tensor, key: torch.Tensor | None = None, value: torch.Tensor | None = None, **options: Any) -> Selection:
    """What `attention` would do with the same arguments, without running anything: what is chosen, and why nothing else is.

    Never raises `NoBackendError`: a selection without `chosen` says the same. Other errors are those of `attention`.
    """
    unknown = set(options) - set(_OPTIONS)
    if unknown:
        raise TypeError(f"explain() got an unexpected keyword argument {sorted(unknown)[0]!r}; the options are {', '.join(_OPTIONS)}")
    arguments = {name: options.get(name, default) for name, default in _OPTIONS.items()}
    arguments.update(query=query, key=key, value=value)
    if arrays.foreign(query):
        arguments, _ = arrays.as_tensors(arguments)
    if arguments["cache"] is not None and arguments["cu_seqlens"] is not None:
        return in_rows(explain, arguments)
    call = _checked(arguments)
    return choose(call, arguments["backend"], arguments["layer"], policy.current_scope.get(), must=False)


def explain_spec(spec: AttentionSpec, backend: policy.Names | None = None, layer: str | None = None) -> Selection:
    """What would be chosen for a spec, for a device that need not be here."""
    chosen_by = policy.in_force(backend, layer, policy.current_scope.get())
    return select(spec, registry.backends().values(), chosen_by, registry.failures())


def last_selection() -> Selection | None:
    """The selection of the last call that ran in this thread; None before the first. Calls inside a compiled region don't show here."""
    return _last.selection


# ---------------------------------------------------------------------- the three steps


def _arguments(variables: dict[str, Any]) -> dict[str, Any]:
    return {name: variables[name] for name in ("query", "key", "value", *_OPTIONS)}


def _checked(arguments: dict[str, Any]) -> AttentionCall:
    options = {name: arguments[name] for name in _CALL_OPTIONS}
    return AttentionCall(arguments["query"], arguments["key"], arguments["value"], **options)


def choose(
    call: AttentionCall, backend: policy.Names | None, layer: str | None, scope: policy.Scope | None, *, must: bool = True
) -> Selection:
    """The selection for a checked call; made once for each spec and policy. With `must`, raises `NoBackendError` when there is none."""
    registry.load()
    named = tuple(backend) if isinstance(backend, list) else backend
    if _wants_forms(call) and _somebody_packs(call, policy.in_force(named, layer, scope)):
        call.examine_padding()
    question = (call.spec, named, layer, scope)
    selections = _selections
    selection = selections.get(question)
    if selection is None:
        selection = select(call.spec, registry.backends().values(), policy.in_force(named, layer, scope), registry.failures())
        if len(selections) >= _LIMIT:
            selections.clear()
        selections[question] = selection
    if must:
        _check_selection(selection, scope)
    return selection


def run(call: AttentionCall, backend: Backend, function: Callable[[AttentionCall], Output]) -> Output:
    """Runs a call by a function of the chosen backend and gives the result the caller's shape."""
    if call.pages is not None and Feature.PAGED not in backend.claims.features:
        call.gather_pages()
    given = call.layout
    if call.spec.zero_size:
        result = _of_nothing(call)
    elif backend.layout == given:
        result = function(call)
    else:
        call.to_layout(backend.layout)
        result = function(call)
        result = (result[0].transpose(1, 2), result[1]) if call.return_lse else result.transpose(1, 2)
    if call.return_lse and Feature.LSE_GRADIENT not in backend.claims.features:
        result = (result[0], result[1].detach())
    if call.shape_given == "4-D":
        return result
    output = result[0] if call.return_lse else result
    output = output.flatten(2) if call.shape_given == "flat" else output.squeeze(0)
    return (output, result[1]) if call.return_lse else output


def _appending(call: AttentionCall, backend: Backend, function: Callable[[AttentionCall], Output]) -> Output:
    """Runs a call with a cache: new tokens go to spare room, and count only once the backend is through."""
    cache, step = call.cache, call.step
    if step.new is None:
        return run(call, backend, function)
    try:
        cache.write(step)
        result = run(call, backend, function)
    except BaseException:
        cache.undo(step)
        raise
    cache.commit(step)
    return result


def _of_nothing(call: AttentionCall) -> Output:
    """The result when a size is 0: no row sees anything. Connected to the inputs, so that a backward pass finds zero gradients."""
    shape = (*call.query.shape[:3], call.value_dim)
    output = call.query.new_zeros(shape)
    for tensor in (call.query, call.key, call.value):
        if tensor is not None and tensor.requires_grad:
            output = output + tensor.masked_fill(torch.ones((), dtype=torch.bool, device=tensor.device), 0.0).sum()
    if not call.return_lse:
        return output
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    lse = torch.full((call.batch, call.query_heads, call.query_length), float("-inf"), dtype=dtype, device=call.device)
    if call.sinks is not None:
        lse = torch.maximum(lse, call.sinks.to(dtype)[None, :, None])
        if (queries := real_queries(call)) is not None:
            lse = lse.masked_fill(~queries[:, None], float("-inf"))
    return output, lse


# ---------------------------------------------------------------------- the compiler's way

_OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(attention).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}
_CALL_OPTIONS = tuple(name for name in _OPTIONS if name != "backend")


def _traced(arguments: dict[str, Any]) -> Output:
    """The same three steps under torch.compile: the choice becomes a constant of the graph, guarded by the policy's epoch and scope."""
    call = _checked(arguments)
    backend = arguments["backend"]
    named = tuple(backend) if isinstance(backend, list) else backend
    name = _chosen_while_tracing(call.facts(), named, arguments["layer"], policy.process.epoch, policy.mirror.scope)
    backend = registry.by_name(name)
    if call.step is None or call.step.new is None:
        return run(call, backend, backend.run)
    call.cache.write(call.step)
    result = run(call, backend, backend.run)
    call.cache.commit(call.step)
    return result


def _chosen_while_tracing(facts: tuple, backend: Any, layer: str | None, epoch: int, scope: int) -> str:
    """The chosen backend's name. Runs at trace time, as ordinary Python; in a thread of its own, because loading a plugin or asking a
    library what it can do must not happen under the tracer's fake tensors, which are thread-local."""

    def work() -> str:
        registry.load()
        around = policy.scope_of(scope)
        selection = select(spec_from(facts), registry.backends().values(), policy.in_force(backend, layer, around), registry.failures())
        _check_selection(selection, around)
        return selection.chosen.name

    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(work).result()


# What torch.compiler.assume_constant_result sets; that function would import the whole compiler here. The epoch and the scope's number are
# read, and so guarded, by the traced code above.
_chosen_while_tracing._dynamo_marked_constant = True


# ---------------------------------------------------------------------- what makes the repeated call cheap


def _signature(tensor: torch.Tensor | None) -> tuple | None:
    if tensor is None:
        return None
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def _on_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple:
    """Facts of a CUDA call that its shapes don't tell: alignment, and whether a graph is being captured."""
    return query.data_ptr() % 16, key.data_ptr() % 16, value.data_ptr() % 16, torch.cuda.is_current_stream_capturing()


def _remember(
    signature: tuple, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall, selection: Selection
) -> None:
    template = {n: v for n, v in call.__dict__.items() if not isinstance(v, torch.Tensor) and v is not getattr(AttentionCall, n, signature)}
    as_it_is = call.layout == selection.chosen.layout and not call.return_lse and not selection.spec.zero_size
    plan = _Plan(_fits(query, key, value), template, selection, selection.run if as_it_is else None)
    plans = _plans
    if len(plans) >= _LIMIT:
        plans.clear()
    # A few of one signature may differ in strides or in who needs a gradient; the latest comes first.
    plans[signature] = [plan, *plans.get(signature, ())[:3]]


def _fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]:
    """The compiler's own guard, which looks at all three tensors in C; spelled out where a torch doesn't have it."""
    try:
        return torch._C._dynamo.guards.TensorGuards(query, key, value, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except Exception:
        pass

    def facts(*tensors: torch.Tensor) -> list:
        autocast = torch._C._is_any_autocast_enabled()
        return [(type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_inference(), autocast) for t in tensors]

    was = facts(query, key, value)
    return lambda *tensors: facts(*tensors) == was


def _forget() -> None:
    # New dictionaries, so that a choice made under the old policy, in another thread, lands in the old ones.
    global _plans, _selections
    _plans, _selections = {}, {}


policy.on_change(_forget)


def _check_selection(selection: Selection, scope: policy.Scope | None) -> None:
    if selection.chosen is None:
        raise NoBackendError(selection)
    if scope is not None and scope.expected is not None:
        chosen = selection.chosen
        if chosen.name not in scope.expected and chosen.family not in scope.expected:
            raise AssertionError(f"expected {' or '.join(scope.expected)}, but {chosen.name} would run\n{selection}")


def _wants_forms(call: AttentionCall) -> bool:
    """Whether a padding mask's form is not known yet, and may be looked for."""
    bare = (call.query_mask is not None and call.query_padding is None) or (call.key_mask is not None and call.key_padding is None)
    return bare and not (call.device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _somebody_packs(call: AttentionCall, chosen_by: policy.Policy) -> bool:
    for backend in registry.backends().values():
        named = "auto" in chosen_by.order or backend.name in chosen_by.order or backend.family in chosen_by.order
        if backend.packs and named and backend.reason_missing is None and call.device.type in backend.claims.devices:
            return True
    return False
