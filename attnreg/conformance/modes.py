"""Checks that draw no case: dropout's statistics, the public call, required modes, the compiler, CUDA graphs, hidden syncs."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Iterator

import torch

from .. import registry
from ..attention import attention, explain_spec
from ..backend import Backend
from ..kernels.reference import reference
from ..policy import using
from ..spec import AttentionSpec, Feature
from . import numerics
from .cases import Case
from .strategies import head_dims, page_shapes
from .tensors import Result, arrange, canonical, checked, values
from .trial import Tally, attempt, attend, compare, fitted, same_bits


def checks_for(backend: Backend, device: str, dtypes, compiler: str) -> list[tuple[str, Callable[[Tally], None]]]:
    """(name, body) of each check that the claims call for."""
    claimed = backend.claims.features
    on = functools.partial(_plain_cases, backend, device, dtypes)
    found = [("public_call", functools.partial(public_call, backend, on))]
    if Feature.PAGED in claimed:
        size, dim = page_shapes(backend.claims, device, dtypes[0], head_dims(backend.claims, "small"))[0]
        one_query = {"query_length": 1, "query_mask": None, "key_mask": None}
        paged = {"page_size": size, "key_length": 2 * size + 3, "key_lengths": True, "head_dim": dim, "value_dim": dim, **one_query}
        found.append(("public_call[paged]", functools.partial(public_call, backend, lambda: [c for c in on(**paged) if c.page_size])))
    if Feature.DROPOUT in claimed:
        found.append(("dropout", functools.partial(dropout, backend, device, dtypes)))
    for feature in (Feature.COMPILE, Feature.CAPTURE, Feature.DROPOUT, Feature.BATCH_INVARIANT):
        if feature not in claimed:
            found.append((f"refuses[{feature}]", functools.partial(refuses, backend, feature, on)))
    if Feature.COMPILE in claimed:
        found.append(("compiles", functools.partial(compiles, backend, on, compiler)))
    if Feature.BACKWARD in claimed:
        found.append(("second_derivative", functools.partial(second_derivative, backend, on)))
    if Feature.LSE in claimed and Feature.LSE_GRADIENT not in claimed:
        found.append(("lse_is_detached", functools.partial(lse_is_detached, backend, on)))
    if device == "cuda":
        found.append(("does_not_wait", functools.partial(does_not_wait, backend, lambda: on(declared=True))))
        if Feature.CAPTURE in claimed:
            found.append(("captures", functools.partial(captures, backend, on)))
            if Feature.PACKED in claimed:
                found.append(("does_not_wait[packed]", functools.partial(does_not_wait, backend, lambda: _packed_cases(backend, on))))
    return found


def _plain_cases(backend: Backend, device: str, dtypes, **more) -> list[Case]:
    """A few fixed calls, as far as the backend takes them, the simplest first."""
    size = head_dims(backend.claims, "small")[0]
    dtype = str(dtypes[0]).removeprefix("torch.")
    start = Case(seed=5, device=device, dtype=dtype, batch=2, query_length=9, key_length=9, key_heads=2, head_dim=size, value_dim=size)
    wanted = [
        start,
        start.replace(causal=True, group=2, form="bhsd"),
        start.replace(key_mask="right", query_mask="keys", declared=True, softcap=2.0, alibi="heads"),
        start.replace(causal=True, bias=(False, True, True, True), window=(3, None), key_length=12, scale=0.2, sinks=True),
    ]
    cases = [fitted(backend, case.replace(**more), frozenset()) for case in wanted]
    return [case for case in cases if case is not None]


def _packed_cases(backend: Backend, plain_cases) -> list[Case]:
    """The same calls, packed, with `max_seqlens` given. Who refuses one while a graph is captured has said that it reads the host's lengths."""
    dense = {"query_mask": None, "key_mask": None, "bias": None, "alibi": None}
    packed = [case for case in plain_cases(batch=1, segments=3, max_seqlens=True, **dense) if case.segments]
    return [case for case in packed if not _refused(backend, case, capturing=True)]


@contextlib.contextmanager
def present(backend: Backend) -> Iterator[None]:
    """The backend registered under its name, whoever had it before."""
    if registry.backends().get(backend.name) is backend:
        yield
        return
    with registry.standing_in(backend):
        yield


def public_call(backend: Backend, plain_cases, tally: Tally) -> None:
    """`attnreg.attention(..., backend=name)`, new and repeated with other numbers, gives what the backend gives."""
    cases = plain_cases()
    assert cases, "refuses every plain call"
    with present(backend):
        for case in cases:
            tally.see(case)
            for seed in (1, 2, 3):
                given = values(case.replace(seed=seed))
                arguments, _ = arrange(case, given)
                output = canonical(case, attention(**arguments, backend=backend.name))
                compare(backend, case, given, _only(output), tally)


def dropout(backend: Backend, device: str, dtypes, tally: Tally) -> None:
    """Each weight is kept with probability 1 - p to within 1/255, scaled by 1/(1 - p), anew for every row; lse does not change."""
    size = max((n for n in head_dims(backend.claims, "small") + [64, 128] if backend.claims.head_dim.takes(n) and n <= 128), default=0)
    dtype = str(dtypes[0]).removeprefix("torch.")
    p = 0.3
    case = Case(
        device=device, dtype=dtype, batch=4, query_length=64, key_length=size, key_heads=4, head_dim=size, value_dim=size, dropout=p
    )
    case = fitted(backend, case, frozenset({Feature.DROPOUT}))
    assert case is not None and case.dropout, "claims dropout, but refuses a plain call with it"
    # Equal scores and one-hot values: the output is the row of dropped weights itself.
    given = values(case)
    one_hot = torch.eye(size, dtype=given.tensors["value"].dtype, device=device)[None, :, None].expand(4, -1, 4, -1)
    given = given.changed(query=torch.zeros_like(given.tensors["query"]), value=one_hot)

    def run(seed: int, case: Case = case):
        torch.manual_seed(seed)
        arguments, leaves = arrange(case, given)
        result = attend(backend, arguments)
        output, lse = result if case.lse else (result, None)
        return output, lse, leaves

    output, _, _ = run(7)
    weights = output.detach().double() * size
    kept = weights > 0.5
    count = kept.numel()
    rate, spread = float(kept.double().mean()), math.sqrt(p * (1 - p) / count)
    assert abs(rate - (1 - p)) <= 1 / 255 + 5 * spread, f"keeps {rate:.4f} of the weights, expected {1 - p} within 1/255"
    per_row = kept.double().mean(-1)
    limit = 1 / 255 + 6 * math.sqrt(p * (1 - p) / size)
    worst = float((per_row - (1 - p)).abs().max())
    assert worst <= limit, f"a row keeps {worst:.3f} more or fewer of its weights than {1 - p}; each weight is kept on its own"
    scales = weights[kept]
    worst = float((scales * (1 - p) - 1).abs().max())
    allowed = 1 / 255 / (1 - p) + 16 * torch.finfo(output.dtype).eps
    assert worst <= allowed, f"kept weights are scaled by {float(scales.mean()):.4f}, expected 1/(1 - p) = {1 / (1 - p):.4f}"
    assert bool((weights[~kept] == 0).all()), "dropped weights are not exactly 0"
    assert same_bits(run(7)[0].detach(), output.detach()), "another result under the same torch.manual_seed"
    assert not same_bits(run(8)[0].detach(), output.detach()), "the same result under another torch.manual_seed"
    rows = kept.flatten(0, 2)
    equal = float((rows[0] == rows[1:]).double().mean())
    expected = p * p + (1 - p) ** 2
    assert abs(equal - expected) < 0.05, "rows drop the same weights, expected each row on its own"
    with_lse = (
        fitted(backend, case.replace(lse=True), frozenset({Feature.DROPOUT, Feature.LSE}))
        if Feature.LSE in backend.claims.features
        else None
    )
    if with_lse is not None:
        _, lse, _ = run(7, with_lse)
        error = float((lse.double() - math.log(size)).abs().max())
        assert error < 8 * torch.finfo(output.dtype).eps * math.log(size), f"lse: off by {error:.3g} under dropout, which leaves it alone"
    learning = (
        fitted(backend, case.replace(gradients=("value",)), frozenset({Feature.DROPOUT, Feature.BACKWARD}))
        if Feature.BACKWARD in backend.claims.features
        else None
    )
    if learning is not None:
        output, _, leaves = run(7, learning)
        gradient_in = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output)
        (found,) = torch.autograd.grad(output, [leaves["value"]], [gradient_in])
        dropped = output.detach().double()
        right = torch.einsum("bihj,bihd->bjhd", dropped, gradient_in.double())
        error = numerics.largest_difference(found, right)
        allowed = 64 * torch.finfo(output.dtype).eps * numerics.largest(right)
        assert error <= allowed, f"gradient of value: off by {error:.3g}: the backward pass drops other weights than the forward pass"


def refuses(backend: Backend, feature: Feature, plain_cases, tally: Tally) -> None:
    """A mode that is not claimed is refused, with that reason."""
    call = checked(plain_cases()[0])
    asked = {
        Feature.COMPILE: {"compiling": True},
        Feature.CAPTURE: {"capturing": True},
        Feature.DROPOUT: {"dropout": True},
        Feature.BATCH_INVARIANT: {},
    }[feature]
    spec: AttentionSpec = call.spec._replace(**asked)
    with present(backend), using(require={feature.value} if feature is Feature.BATCH_INVARIANT else ()):
        selection = explain_spec(spec, backend.name)
    reasons = [reason.what for reason in selection.rejected.get(backend.name, ())]
    assert selection.chosen is None and reasons == [feature.value], f"refused for {reasons}, expected exactly {[feature.value]}"


def lse_is_detached(backend: Backend, plain_cases, tally: Tally) -> None:
    """Without a claim to gradients through lse, none flow."""
    for case in plain_cases(lse=True, gradients=("query",) if Feature.BACKWARD in backend.claims.features else ()):
        if case.lse:
            _, lse = attend(backend, arrange(case, values(case))[0])
            assert not lse.requires_grad, "lse requires a gradient, but lse_gradient is not claimed"


def second_derivative(backend: Backend, plain_cases, tally: Tally) -> None:
    """A loss of the output and of its gradient: right, or an error. Never as if the gradient were a constant."""
    case = next((case for case in plain_cases(gradients=("query",)) if case.gradients), None)
    assert case is not None, "claims backward, but refuses it for every plain call"
    given = values(case)

    def twice(backend: Backend, dtype: torch.dtype | None = None) -> torch.Tensor:
        arguments, leaves = arrange(case, given, dtype)
        output = attend(backend, arguments)
        (first,) = torch.autograd.grad(output.pow(2).sum(), leaves["query"], create_graph=True)
        return torch.autograd.grad(output.sum() + first.pow(2).sum(), leaves["query"])[0]

    try:
        got = twice(backend)
    except RuntimeError:  # NotImplementedError is one too
        return
    right = twice(reference, torch.float64)
    error, allowed = numerics.largest_difference(got, right), 0.1 * numerics.largest(right)
    how = "no second derivative, and no error: raise in its backward where torch.is_grad_enabled()"
    assert error <= allowed, f"gradient of a loss of a gradient: off by {error:.3g}, largest {10 * allowed:.3g}: {how}"


def _taken(backend: Backend, cases: list[Case], **mode: bool) -> list[Case]:
    """The cases that the backend's rules don't refuse in a mode; never none, where the mode is claimed."""
    taken = [case for case in cases if not _refused(backend, case, **mode)]
    assert taken, f"claims {', '.join(mode)}, but refuses every plain call"
    return taken


def _refused(backend: Backend, case: Case, **mode: bool) -> bool:
    return bool(backend.reasons_against(checked(case).spec._replace(**mode)))


def compiles(backend: Backend, plain_cases, compiler: str, tally: Tally) -> None:
    """torch.compile(fullgraph=True) takes the call whole, and gives the same numbers."""
    with present(backend):
        cases = _taken(backend, plain_cases(declared=False), compiling=True)
        for case in cases if compiler != "eager" else cases[:3]:
            tally.see(case)
            torch._dynamo.reset()
            given = values(case)
            arguments, _ = arrange(case, given)
            tensors = {n: t for n, t in arguments.items() if isinstance(t, torch.Tensor)}
            rest = {n: a for n, a in arguments.items() if n not in tensors}
            function = functools.partial(_attend_named, rest=rest, name=backend.name)
            output = torch.compile(function, fullgraph=True, backend=compiler)(tensors)
            compare(backend, case, given, _only(canonical(case, output)), tally)


def _attend_named(tensors: dict, rest: dict, name: str):
    return attention(**tensors, **rest, backend=name)


def captures(backend: Backend, plain_cases, tally: Tally) -> None:
    """A CUDA graph of the call, replayed on other numbers, gives what the call gives."""
    for case in _taken(backend, plain_cases(), capturing=True):
        first, second = values(case), values(case.replace(seed=case.seed + 1))
        second = second._replace(options=first.options)
        arguments, _ = arrange(case, first)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(3):
                attend(backend, arguments)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # an earlier graph that is freed during a capture would end it
        with torch.no_grad(), torch.cuda.graph(graph):
            output = attend(backend, arguments)
        others, _ = arrange(case, second)
        for name in second.tensors:
            arguments[name].copy_(others[name])
        graph.replay()
        torch.cuda.synchronize()
        compare(backend, case, second, _only(canonical(case, output.clone())), tally)


def does_not_wait(backend: Backend, cases: Callable[[], list[Case]], tally: Tally) -> None:
    """No hidden copy to the host: the calls run under `torch.cuda.set_sync_debug_mode("error")`, and backward too where that is claimed.

    Declared paddings and `max_seqlens` are given, as a caller who wants no copy gives them; and beside gradients no bias, at which attnreg
    itself looks once.
    """
    for case in cases():
        learned = case.replace(gradients=("query", "key", "value"), bias=None)
        learned = fitted(backend, learned, frozenset((Feature.BACKWARD,))) if Feature.BACKWARD in backend.claims.features else None
        for each in (case, learned) if learned is not None else (case,):
            attempt(backend, each, values(each))  # what is built or compiled once may wait
            given = values(each)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                attempt(backend, each, given)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def _only(output: torch.Tensor) -> Result:
    return Result(output.detach(), None, {})
