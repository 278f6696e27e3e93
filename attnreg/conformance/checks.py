"""What must hold for any backend, as functions of a backend and a case. Each raises AssertionError where it does not."""

from __future__ import annotations

import torch

from ..backend import Backend
from ..select import NoBackendError
from ..spec import Feature
from ..visibility import real_keys, real_queries, visible
from . import numerics
from .cases import Case
from .tensors import Result, Values, arrange, checked, values
from .trial import Tally, attempt, attend, choose, compare, same_bits


def equals_reference(backend: Backend, case: Case, tally: Tally) -> None:
    """Output, lse and gradients are as near to the truth as they must be, and the caller's tensors are as they were."""
    given = values(case)
    arguments, _ = arrange(case, given)
    tensors = {name: t for name, t in arguments.items() if isinstance(t, torch.Tensor)}
    if case.page_size:
        tensors.update(zip(("pages of keys", "pages of values", "block table", "lengths"), arguments["cache"].tensors))
    before = {name: t.detach().clone() for name, t in tensors.items()}
    attend(backend, arguments)
    for name, tensor in tensors.items():
        assert same_bits(tensor.detach(), before[name]), f"{name}: changed in place"
    got = attempt(backend, case, given)
    compare(backend, case, given, got, tally)


def poison_does_not_leak(backend: Backend, case: Case, tally: Tally) -> None:
    """NaN and Inf in any padding give the bits that finite padding gives, forward and backward."""
    case = case.replace(finite_padding=False)
    given = values(case)
    call = checked(case, given)
    queries, keys = real_queries(call), real_keys(call)
    random = torch.Generator().manual_seed(case.seed + 1)
    poison = torch.tensor([float("nan"), float("inf"), float("-inf")])
    changes = {}
    for name, real in (("query", queries), ("key", keys), ("value", keys)):
        if real is not None:
            tensor = given.tensors[name]
            bad = poison[torch.randint(0, 3, tensor.shape, generator=random)].to(tensor)
            changes[name] = torch.where(real[:, :, None, None], tensor, bad)
    if "bias" in given.tensors:
        bias = given.tensors["bias"]
        # A number is padding if every slot, or every query, that it is broadcast to is one.
        real = torch.ones_like(bias, dtype=torch.bool)
        for side, kept in ((keys, lambda r: r[:, None, None, :]), (queries, lambda r: r[:, None, :, None])):
            if side is not None:
                places = kept(side)
                for dim, size in enumerate(bias.shape):
                    places = places.any(dim, keepdim=True) if size == 1 else places
                real = real & places
        changes["bias"] = torch.where(real, bias, float("nan"))
    if not changes:
        return
    clean, poisoned = attempt(backend, case, given), attempt(backend, case, given.changed(**changes))
    _assert_same(backend, case, poisoned, clean, "with NaN and Inf in the padding")
    compare(backend, case, given, poisoned, tally)


def hidden_changes_nothing(backend: Backend, case: Case, tally: Tally) -> None:
    """A finite change to slots that a row may not see leaves that row's bits; unseen slots get a gradient of exactly zero."""
    given = values(case)
    seen = _seen(case, given)
    random = torch.Generator().manual_seed(case.seed + 2)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(case.device, getattr(torch, case.dtype))

    base = attempt(backend, case, given)
    # One slot: whatever row does not see it must not move.
    batch, keys = case.batch, case.key_length
    slot = int(torch.randint(0, keys, (1,), generator=random))
    changes = {}
    for name in ("key", "value"):
        tensor = given.tensors[name].clone()
        tensor[:, slot] = 50 * drawn(batch, case.key_heads, tensor.shape[3])
        changes[name] = tensor
    got = attempt(backend, case, given.changed(**changes))
    blind = ~seen[..., slot]
    _assert_rows(got, base, blind, f"after a change of slot {slot}, which they may not see")
    # One query: no other row may move.
    row = int(torch.randint(0, case.query_length, (1,), generator=random))
    tensor = given.tensors["query"].clone()
    tensor[:, row] = 50 * drawn(batch, case.query_heads, case.head_dim)
    got = attempt(backend, case, given.changed(query=tensor))
    others = (torch.arange(case.query_length, device=case.device) != row).expand(seen.shape[:3])
    _assert_rows(got, base, others, f"after a change of query {row}")
    if not case.gradients:
        return
    # Only one row asks: what it does not see gets nothing.
    only = torch.zeros_like(given.output_gradient)
    only[:, row] = given.output_gradient[:, row]
    no_lse = case.replace(lse_gradient=False)
    got = attempt(backend, no_lse, given._replace(output_gradient=only))
    queries = real_queries(checked(case, given))
    real = (
        torch.ones(seen.shape[:1] + seen.shape[2:3], dtype=torch.bool, device=case.device) if queries is None else queries.expand(batch, -1)
    )
    unseen = ~(seen[:, :, row] & real[:, None, row, None]).unflatten(1, (case.key_heads, case.group)).any(2)
    asked = torch.zeros_like(real)
    asked[:, row] = real[:, row]
    dense = case.strides == "contiguous"
    for name, silent in (
        ("key", unseen.transpose(1, 2)),
        ("value", unseen.transpose(1, 2)),
        ("query", ~asked[:, :, None].expand(-1, -1, case.query_heads)),
    ):
        if name in got.gradients and dense:
            worst = numerics.largest_difference(got.gradients[name][silent], torch.zeros_like(got.gradients[name][silent]))
            assert worst == 0, f"gradient of {name}: {worst:.3g} where only query {row} asks and may not see it, expected exactly 0"


def empty_rows_are_zero(backend: Backend, case: Case, tally: Tally) -> None:
    """A query that sees nothing gives zeros, lse -inf (with a sink, the sink), and no gradient."""
    given = values(case)
    got = attempt(backend, case, given)
    call = checked(case, given)
    empty = ~_seen(case, given).any(-1)
    rows = got.output.transpose(1, 2)[empty]
    assert bool((rows == 0).all()), f"output of rows that see nothing: {rows.flatten()[:3].tolist()}, expected exactly 0"
    if got.lse is not None:
        queries = real_queries(call)
        wanted = torch.full_like(got.lse, float("-inf"))
        if case.sinks:
            wanted = wanted.maximum(given.tensors["sinks"].to(wanted)[None, :, None])
            if queries is not None:
                wanted = wanted.masked_fill(~queries[:, None], float("-inf"))
        error = numerics.largest_difference(got.lse[empty], wanted[empty])
        allowed = 8 * torch.finfo(getattr(torch, case.dtype)).eps * max(1.0, numerics.largest(wanted))
        assert error <= allowed, f"lse of rows that see nothing: {got.lse[empty][:3].tolist()}, expected {wanted[empty][:3].tolist()}"
    compare(backend, case, given, got, tally)


def same_bits_twice(backend: Backend, case: Case, tally: Tally) -> None:
    """With `deterministic=True`, the same call gives the same bits, backward too."""
    case = case.replace(deterministic=True)
    given = values(case)
    first = attempt(backend, case, given)
    for _ in range(3):
        _assert_same(backend, case, attempt(backend, case, given), first, "a second time")


def rows_permute(backend: Backend, case: Case, tally: Tally) -> None:
    """Permuting the rows of the batch permutes the result."""
    given = values(case)
    order = torch.arange(case.batch - 1, -1, -1, device=case.device)
    moved = given._replace(
        tensors={n: t[order] if _per_row(n, t, case) else t for n, t in given.tensors.items()},
        options={n: _permuted(n, o, order) for n, o in given.options.items()},
        output_gradient=given.output_gradient[order],
        lse_gradient=given.lse_gradient[order],
    )
    got = attempt(backend, case, moved)
    straight = attempt(backend, case, given)
    back = Result(
        got.output[order],
        None if got.lse is None else got.lse[order],
        {n: g[order] if _per_row(n, given.tensors[n], case) else g for n, g in got.gradients.items()},
    )
    compare(backend, case, given, back, tally)
    compare(backend, case, given, straight, tally)
    if Feature.BATCH_INVARIANT in backend.claims.features and not case.gradients:
        _assert_same(backend, case, back, straight, "in another order")


def batch_invariant(backend: Backend, case: Case, tally: Tally) -> None:
    """A row alone has the bits that it has in a batch."""
    case = case.replace(gradients=(), lse_gradient=False)
    given = values(case)
    whole = attempt(backend, case, given)
    for row in range(case.batch):
        index = torch.tensor([row], device=case.device)
        alone = given._replace(
            tensors={n: t[index] if _per_row(n, t, case) else t for n, t in given.tensors.items()},
            options={n: _permuted(n, o, index) for n, o in given.options.items()},
        )
        got = attempt(backend, case.replace(batch=1), alone)
        lse = None if whole.lse is None else whole.lse[index]
        _assert_same(backend, case, got, Result(whole.output[index], lse, {}), f"alone, row {row}")


def halves_merge(backend: Backend, case: Case, tally: Tally) -> None:
    """Attending to each half of the keys and merging by lse equals the whole."""
    case = case.replace(lse=True, gradients=(), lse_gradient=False)
    given = values(case)
    cut = case.key_length // 2
    parts = []
    for start, stop in ((0, cut), (cut, case.key_length)):
        tensors = {n: t[:, start:stop] if n in ("key", "value") else t for n, t in given.tensors.items()}
        options = dict(given.options)
        for name in ("bias", "mask"):
            holder = tensors if name == "bias" else options
            if name in holder and holder[name].shape[3] == case.key_length > 1:
                holder[name] = holder[name][..., start:stop]
        if "key_mask" in options:
            mask = checked(case, given).key_mask
            options["key_mask"] = mask[:, start:stop]
        if case.query_mask is not None:
            options["query_mask"] = checked(case, given).query_mask
        parts.append(attempt(backend, case.replace(key_length=stop - start), given._replace(tensors=tensors, options=options)))
    wide = torch.float64
    lses = torch.stack([part.lse.to(wide) for part in parts])
    lse = torch.logsumexp(lses, 0)
    shares = torch.exp(lses - lse.masked_fill(lse == float("-inf"), 0.0))
    output = sum(share.transpose(1, 2)[..., None] * part.output.to(wide) for share, part in zip(shares, parts))
    whole = Result(output.to(parts[0].output.dtype), lse.to(parts[0].lse.dtype), {})
    compare(backend, case, given, whole, tally)


def refuses(backend: Backend, case: Case, tally: Tally, feature: Feature) -> None:
    """A call that asks for an unclaimed feature is refused, with exactly that reason."""
    given = values(case)
    arguments, _ = arrange(case, given)
    selection = choose(backend, checked(case, given))
    unclaimed = {f.value for f in selection.spec.features if f not in backend.claims.features}
    reasons = {reason.what for reason in selection.rejected.get(backend.name, ())}
    assert feature in selection.spec.features, f"the drawn call does not ask for {feature}; this is a fault of the suite"
    assert selection.chosen is None and feature.value in reasons, f"{feature}: not claimed, but a call that asks for it is not refused"
    assert reasons >= unclaimed, f"refused for {sorted(reasons)}, expected {sorted(unclaimed)}"
    try:
        attend(backend, arguments)
    except NoBackendError as error:
        assert f"- {feature.value}: " in str(error), f"the error does not name {feature.value}: {error}"
    else:
        raise AssertionError(f"{feature}: not claimed, but the call ran")


# ---------------------------------------------------------------------- what the checks share


def _seen(case: Case, given: Values) -> torch.Tensor:
    """Which slots each row sees, bias counted, (B, Hq, Sq, Sk) bool; nothing for padded rows."""
    call = checked(case, given)
    shape = (case.batch, case.query_heads, case.query_length, case.key_length)
    seen = torch.ones(shape, dtype=torch.bool, device=case.device)
    if (allowed := visible(call)) is not None:
        seen = seen & allowed
    if call.bias is not None:
        seen = seen & (call.bias != float("-inf"))
    if (queries := real_queries(call)) is not None:
        seen = seen & queries[:, None, :, None]
    return seen


def _assert_rows(got: Result, base: Result, rows: torch.Tensor, when: str) -> None:
    """rows: (B, Hq, Sq) bool, those that must not have moved."""
    output = got.output.transpose(1, 2)[rows]
    assert same_bits(output, base.output.transpose(1, 2)[rows]), f"output: rows moved {when}"
    if got.lse is not None:
        assert same_bits(got.lse[rows], base.lse[rows]), f"lse: rows moved {when}"


def _assert_same(backend: Backend, case: Case, got: Result, expected: Result, when: str) -> None:
    assert same_bits(got.output, expected.output), f"output: other bits {when}"
    if got.lse is not None:
        assert same_bits(got.lse, expected.lse), f"lse: other bits {when}"
    for name, gradient in got.gradients.items():
        if case.deterministic or case.device == "cpu":
            assert same_bits(gradient, expected.gradients[name]), f"gradient of {name}: other bits {when}"
        else:
            # The order of a sum may differ from run to run on such a device; `compare` bounds the error.
            assert bool(gradient.isfinite().all()), f"gradient of {name}: not finite {when}"


def _per_row(name: str, tensor: torch.Tensor, case: Case) -> bool:
    """Whether the first dimension of a tensor is the batch."""
    if name == "sinks" or (name == "alibi_slopes" and tensor.dim() == 1):
        return False
    return not (name == "bias" and tensor.shape[0] == 1 and case.batch != 1)


def _permuted(name: str, option, order: torch.Tensor):
    if isinstance(option, list):
        return [option[n] for n in order.tolist()]
    if name in ("query_mask", "key_mask"):
        return getattr(option, "mask", option)[order]
    if name == "mask" and option.shape[0] == 1:
        return option
    return option[order] if isinstance(option, torch.Tensor) else option
