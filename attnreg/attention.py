"""The public call, in three visible steps: check it (`call`), choose a backend (`selections`), run it (`run`)."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from . import arrays, plans, policy, registry
from .backend import Backend, Output
from .cache.segments import in_rows
from .call import AttentionCall
from .checks.options import take_lengths
from .looked import transforming
from .packing import Padding
from .plans import on_device, signature_of, step_facts
from .run import run, run_appending
from .select import Selection, select
from .selections import choose, choose_while_tracing
from .spec import AttentionSpec, Feature

if TYPE_CHECKING:
    from .cache import LayerCache

MaskLike = torch.Tensor | Padding


class _Last(threading.local):
    selection: Selection | None = None


_last = _Last()
# Bound once: each look-up of a name in a module costs the repeated call a tenth of a microsecond.
_new_call = AttentionCall.__new__
# By the compiler or an export: a symbolic size that is compared with a plan's would be guarded.
_tracing = torch.compiler.is_compiling
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
        What was found by looking at a padding mask is kept until torch counts a change in place; a change through NumPy, which shares
        its memory, is not counted.
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
    segments_of_cache = cache is not None and cu_seqlens is not None
    if segments_of_cache or _tracing():
        # Spelled out: not every torch's compiler knows `locals`.
        given = {
            "query": query, "key": key, "value": value, "causal": causal, "window": window, "query_mask": query_mask,
            "key_mask": key_mask, "mask": mask, "bias": bias, "key_lengths": key_lengths, "query_lengths": query_lengths,
            "key_starts": key_starts, "cu_seqlens": cu_seqlens, "max_seqlens": max_seqlens, "alibi_slopes": alibi_slopes,
            "softcap": softcap, "sinks": sinks, "scale": scale, "dropout_p": dropout_p, "finite_padding": finite_padding,
            "layout": layout, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "cache": cache, "return_lse": return_lse,
            "deterministic": deterministic, "backend": backend, "layer": layer,
        }  # fmt: skip
        if not segments_of_cache:
            return _traced(given)
        return arrays.attend(attention, given) if arrays.foreign(query) else in_rows(attention, given)
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
        options = plans.optional(query_mask, key_mask, mask, bias, alibi_slopes, sinks)
    lengths = None
    if key_lengths is not None or query_lengths is not None or key_starts is not None:
        lengths = (key_lengths is not None, query_lengths is not None, key_starts is not None)
    remembered, asked, plan, step = plans.by_signature, None, None, None
    # What lengths mean beside masks depends on the values of both, which are looked at anew.
    if cu_seqlens is None and (options is None or (cache is None and lengths is None)) and (cache is None or lengths is None):
        try:
            asked = (
                causal, window, softcap, scale, dropout_p, finite_padding, layout, n_heads, n_kv_heads, return_lse, max_seqlens,
                tuple(backend) if backend.__class__ is list else backend, lengths, layer, deterministic, _deterministic(), _grad_enabled(),
                scope, query.is_cuda and on_device(query, key, value),
                query.is_nested or key.is_nested or value.is_nested,  # at which the guard of a plan would end the process
                None if cache is None else type(cache), options and tuple(map(signature_of, options.values())), forward_ad._current_level,
            )  # fmt: skip
            # The layers of a model repeat one call, which is found by comparing alone.
            plan = remembered.get(plans.LATEST)
            if plan is None or cache is not None or plan.asked != asked or not plan.fits(query, key, value):
                plan = None
                for known in remembered.get((asked, query.shape, key.shape), ()):
                    if known.fits(query, key, value):
                        if cache is not None:
                            new = (key, value) if layout == "bshd" else (key.transpose(1, 2), value.transpose(1, 2))
                            step = step or cache.prepare(*new, None, window, None)
                            if known.step != step_facts(step, query.shape[1 if layout == "bshd" else 2]):
                                continue
                        plan = remembered[plans.LATEST] = known
                        break
            # What merely equals a checked option, as 1 does True, is checked itself. The usual kinds are told apart without a call.
            if plan is not None and (
                causal.__class__ is not bool
                or return_lse.__class__ is not bool
                or finite_padding.__class__ is not bool
                or dropout_p.__class__ is not float
                or (scale is not None and scale.__class__ is not float)
                or not (softcap is window is deterministic is n_heads is n_kv_heads is None)
            ):
                flags, numbers = (causal, return_lse, finite_padding, deterministic), (softcap, scale, dropout_p)
                if not plans.of_their_kinds(flags, numbers, (n_heads, n_kv_heads, *(window or ()))):
                    asked = plan = None
        except (AttributeError, TypeError, RuntimeError):  # not tensors, or not hashable: the checks below say what is wrong, or take it
            asked = plan = None
    if plan is None:
        if arrays.foreign(query):
            return arrays.attend(attention, _arguments(locals()))
        call = _checked(locals())
        selection = choose(call, backend, layer, scope)
        _last.selection = selection
        # Made before the backend gets the call, which is then its own to change.
        # Which tensors are dual, or wrapped by torch.func, no guard sees.
        if asked is not None and call.repeatable and asked[-1] < 0 and not transforming():
            if options is not None:  # paddings may be known by now
                options = plans.optional(query_mask, key_mask, mask, bias, alibi_slopes, sinks)
                asked = (*asked[:-2], tuple(map(signature_of, options.values())), asked[-1])
            plan = plans.plan_of(asked, query, key, value, call, selection)
        result = _run(call, selection.chosen, selection.run)
        # Once it has gone well, since what is remembered is not looked at again.
        if plan is not None:
            plans.remember(remembered, plan, query, key)
        return result
    # Set one by one, since Python keeps such attributes without a dictionary.
    call = _new_call(AttentionCall)
    call.query, call.key, call.value = query, key, value
    call.layout, call.causal, call.scale, call._spec = layout, causal, plan.scale, plan.spec
    if plan.template:
        call.__dict__.update(plan.template)
    if options is not None:
        call.__dict__.update(options)
    if lengths is not None:
        take_lengths(call, key_lengths, query_lengths, key_starts)
    _last.selection = plan.selection
    if step is not None:
        call.see(cache, step)
        if plan.run is not None and plan.layout == layout:
            return run_appending(plan.run, call)
        return _run(call, plan.selection.chosen, plan.selection.run)
    if plan.run is None:
        return run(call, plan.selection.chosen, plan.selection.run)
    if plan.layout == layout:
        return plan.run(call)
    call.query, call.key, call.value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    call.layout = plan.layout
    return plan.run(call).transpose(1, 2)


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
    if Feature.DETERMINISTIC in chosen_by.require:
        spec = spec._replace(deterministic=True)
    return select(spec, registry.backends().values(), chosen_by, registry.failures())


def last_selection() -> Selection | None:
    """The selection of the last call that ran in this thread; None before the first. Calls inside a compiled region don't show here."""
    return _last.selection


# ---------------------------------------------------------------------- the three steps


def _checked(arguments: dict[str, Any]) -> AttentionCall:
    options = {name: arguments[name] for name in _CALL_OPTIONS}
    return AttentionCall(arguments["query"], arguments["key"], arguments["value"], **options)


_OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(attention).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}
_CALL_OPTIONS = tuple(name for name in _OPTIONS if name != "backend")


def _run(call: AttentionCall, backend: Backend, function: Callable[[AttentionCall], Output]) -> Output:
    return run(call, backend, function) if call.cache is None else run_appending(run, call, backend, function)


def _traced(arguments: dict[str, Any]) -> Output:
    """The same three steps under torch.compile."""
    call = _checked(arguments)
    backend = choose_while_tracing(call, arguments["backend"], arguments["layer"])
    return _run(call, backend, backend.run)
