"""The flex backend: compiled against the reference for a few structures; every option through the same mods, uncompiled."""

from __future__ import annotations

import dataclasses
import functools
import random
import types

import pytest
import torch

import attnreg
from attnreg import registry
from attnreg.call import AttentionCall
from attnreg.kernels.flex import _attend, flex, run_flex
from attnreg.visibility import real_queries


def make(batch, query_length, key_length, heads=4, key_heads=2, dim=8, value_dim=8, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator, dtype=dtype)
    return (
        draw(batch, query_length, heads, dim),
        draw(batch, key_length, key_heads, dim),
        draw(batch, key_length, key_heads, value_dim),
    )


@pytest.fixture
def uncompiled(monkeypatch):
    """The same backend with flex_attention's own uncompiled formula, which also gives an lse and gradients on a CPU."""
    from torch.nn.attention import flex_attention as module

    def attend(*arguments):
        """Traced, so that flex_attention finds the captured tensors that need gradients, but nothing is compiled."""
        code = _attend.__code__.replace(co_name="attend_uncompiled")
        return torch.compile(types.FunctionType(code, {**globals()}), backend="eager", fullgraph=True, dynamic=False)(*arguments)

    monkeypatch.setattr(module, "_validate_device", lambda *tensors: None)
    claims = flex.claims
    open_rules = tuple(rule for rule in claims.rules if rule.__name__ not in ("_forward_only_on_a_cpu", "_no_lse_on_a_cpu", "_no_compiler"))
    backend = dataclasses.replace(
        flex,
        name="flex-uncompiled",
        run=functools.partial(run_flex, attend=attend),
        capabilities=dataclasses.replace(claims, rules=open_rules),
    )
    registry.register(backend)
    yield backend.name
    registry.unregister(backend.name)


def drawn_call(seed: int) -> tuple[tuple, dict]:
    """A call over all options, with lengths around the size of a block."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    packed = draw.random() < 0.25
    batch = 1 if packed else draw.choice([1, 2, 3])
    query_length, key_length = draw.choice([1, 5, 127, 128, 130, 260]), draw.choice([1, 6, 128, 140, 257])
    key_heads = draw.choice([1, 2])
    heads = key_heads * draw.choice([1, 3])
    tensors = make(batch, query_length, key_length, heads, key_heads, draw.choice([1, 5, 16]), draw.choice([3, 16]), seed=seed)
    maybe = lambda value, chance=0.4: value() if draw.random() < chance else None
    options = {
        "causal": draw.random() < 0.5,
        "window": maybe(lambda: (draw.choice([None, 0, 3, 100]), draw.choice([None, 0, 2, 150]))),
        "softcap": maybe(lambda: draw.choice([0.5, 20.0]), 0.3),
        "scale": maybe(lambda: 0.3, 0.3),
        "alibi_slopes": maybe(lambda: torch.rand(heads) if draw.random() < 0.5 else torch.rand(batch, heads), 0.3),
        "sinks": maybe(lambda: torch.randn(heads), 0.3),
        "bias": maybe(lambda: broadcast(draw, batch, heads, query_length, key_length, torch.randn), 0.3),
        "mask": maybe(lambda: broadcast(draw, batch, heads, query_length, key_length, lambda s: torch.rand(s) < 0.7), 0.3),
    }
    if packed:
        options["cu_seqlens"] = tuple(
            torch.tensor([0, *sorted(draw.randint(0, n) for _ in range(3))], dtype=torch.int32) for n in (query_length, key_length)
        )
    else:
        options |= {
            "key_mask": maybe(lambda: torch.rand(batch, key_length) < 0.7),
            "query_mask": maybe(lambda: torch.rand(batch, query_length) < 0.7),
            "key_lengths": maybe(lambda: [draw.randint(0, key_length) for _ in range(batch)], 0.3),
            "query_lengths": maybe(lambda: [draw.randint(0, query_length) for _ in range(batch)], 0.2),
            "key_starts": maybe(lambda: [draw.randint(0, key_length) for _ in range(batch)], 0.2),
        }
    return tensors, options


def broadcast(draw, batch, heads, query_length, key_length, make_it):
    return make_it(tuple(n if draw.random() < 0.6 else 1 for n in (batch, heads, query_length, key_length)))


def poison(tensors, options):
    """NaN in padding: nothing of it may be seen."""
    call = AttentionCall(*tensors, **options)
    query, key, value = (t.clone() for t in tensors)
    from attnreg.visibility import real_keys

    if (queries := real_queries(call)) is not None:
        query[~queries.expand(query.shape[:2])] = float("nan")
    if (keys := real_keys(call)) is not None:
        key[~keys.expand(key.shape[:2])] = float("nan")
        value[~keys.expand(key.shape[:2])] = float("inf")
    return query, key, value


@pytest.mark.parametrize("seed", range(60))
def test_every_option_means_what_the_reference_says(uncompiled, seed):
    tensors, options = drawn_call(seed)
    learned = {n: options[n].clone().requires_grad_() for n in ("bias", "sinks") if options.get(n) is not None}
    results = {}
    for backend, given in ((uncompiled, poison(tensors, options)), ("reference", tensors)):
        inputs = [t.clone().requires_grad_() for t in given]
        terms = {n: t.detach().clone().requires_grad_() for n, t in learned.items()}
        output, lse = attnreg.attention(*inputs, **{**options, **terms}, return_lse=True, backend=backend)
        seen = lse.detach() != float("-inf")
        weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))
        (output * weight).sum().backward()
        results[backend] = output.detach(), lse.detach().masked_fill(~seen, -1e4), *(t.grad for t in [*inputs, *terms.values()])
    for mine, right in zip(*results.values()):
        mine, right = torch.zeros(()) if mine is None else mine, torch.zeros(()) if right is None else right
        torch.testing.assert_close(mine, right, atol=3e-5, rtol=1e-4)
