"""The flex backend: compiled against the reference for a few structures; every option through the same mods, uncompiled."""

from __future__ import annotations

import dataclasses
import functools
import gc
import random
import types

import pytest
import torch
from amounts import always

import attnreg
from attnreg import registry
from attnreg.call import AttentionCall
from attnreg.kernels import block_masks
from attnreg.kernels import flex as flex_module
from attnreg.kernels.flex import _attend, _compiled, flex, run_flex
from attnreg.visibility import real_keys, real_queries, visible


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
        if torch.compiler.is_compiling():
            return _attend(*arguments)
        code = _attend.__code__.replace(co_name="attend_uncompiled")
        return torch.compile(types.FunctionType(code, {**globals()}), backend="eager", fullgraph=True, dynamic=False)(*arguments)

    monkeypatch.setattr(module, "_validate_device", lambda *tensors: None)
    claims = flex.claims
    open_rules = tuple(rule for rule in claims.rules if "_cpu" not in rule.__name__ and rule.__name__ != "_no_compiler")
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
    if (queries := real_queries(call)) is not None:
        query[~queries.expand(query.shape[:2])] = float("nan")
    if (keys := real_keys(call)) is not None:
        key[~keys.expand(key.shape[:2])] = float("nan")
        value[~keys.expand(key.shape[:2])] = float("inf")
    return query, key, value


@pytest.mark.parametrize("seed", always(range(10), range(30)))
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


@pytest.mark.parametrize("seed", always(range(15), range(40)))
def test_blocks_hold_every_visible_pair_and_full_ones_nothing_else(seed):
    tensors, options = drawn_call(seed)
    call = AttentionCall(*tensors, **options)
    blocks = block_masks.block_mask(call)
    seen = visible(call)
    if seen is None:
        assert blocks is None
        return
    if blocks is None:  # what a single query sees anyhow
        assert call.query_length == 1 and seen.all()
        return
    shape = (call.batch, call.query_heads, call.query_length, call.key_length)
    seen = seen.expand(shape)
    queries = real_queries(call)
    if queries is not None:
        judged = queries[:, None, :, None].expand(shape)
    else:
        judged = torch.ones(shape, dtype=torch.bool)
    partial, full = (dense(blocks, kind, shape) for kind in ("kv", "full_kv"))
    assert not (partial & full).any()
    assert not (judged & seen & ~partial & ~full).any()
    assert not (judged & full & ~seen).any()


def dense(blocks, kind, shape):
    """The blocks of one kind, one by one as torch's kernels read them, at the size of the scores."""
    count, indices = getattr(blocks, f"{kind}_num_blocks"), getattr(blocks, f"{kind}_indices")
    whole = torch.zeros(*indices.shape[:3], indices.shape[3], dtype=torch.bool)
    for b, h, row in torch.cartesian_prod(*map(torch.arange, count.shape)).tolist():
        whole[b, h, row, indices[b, h, row, : count[b, h, row]].long()] = True
    size = block_masks.SIZE
    whole = whole.repeat_interleave(size, 2).repeat_interleave(size, 3)[:, :, : shape[2], : shape[3]]
    return whole.expand(shape)


def test_a_clean_structure_leaves_few_partial_blocks():
    """Sparse, not merely right: a causal window over 1024 slots asks pair by pair only along its two edges."""
    tensors = make(1, 1024, 1024)
    blocks = block_masks.block_mask(AttentionCall(*tensors, causal=True, window=(256, None)))
    partial, full = int(blocks.kv_num_blocks.sum()), int(blocks.full_kv_num_blocks.sum())
    assert partial == 8 + 6 and full == 7
    packed = torch.arange(0, 1025, 128, dtype=torch.int32)
    blocks = block_masks.block_mask(AttentionCall(*tensors, cu_seqlens=(packed, packed)))
    assert int(blocks.kv_num_blocks.sum()) == 0 and int(blocks.full_kv_num_blocks.sum()) == 8


# ---------------------------------------------------------------------- made once


def asked(key_mask, **options):
    return AttentionCall(*make(2, 140, 140), key_mask=key_mask, **options)


def test_layers_share_the_block_mask_of_one_unchanged_mask():
    mask = torch.rand(2, 140) < 0.7
    first = block_masks.remembered_block_mask(asked(mask, causal=True))
    assert block_masks.remembered_block_mask(asked(mask, causal=True)) is first
    windowed = block_masks.remembered_block_mask(asked(mask, causal=True, window=(5, None)))
    assert windowed is not first
    assert block_masks.remembered_block_mask(asked(mask, causal=True)) is first
    assert block_masks.remembered_block_mask(asked(mask.clone(), causal=True)) is not first
    mask[0, 0] = ~mask[0, 0]
    changed = block_masks.remembered_block_mask(asked(mask, causal=True))
    assert changed is not first and block_masks.remembered_block_mask(asked(mask, causal=True)) is changed


def test_a_second_mask_is_part_of_the_question():
    keys, queries = torch.rand(2, 140) < 0.7, torch.rand(2, 140) < 0.7
    first = block_masks.remembered_block_mask(asked(keys, query_mask=queries))
    assert block_masks.remembered_block_mask(asked(keys, query_mask=queries)) is first
    assert block_masks.remembered_block_mask(asked(keys, query_mask=queries.clone())) is not first
    other = block_masks.remembered_block_mask(asked(keys, query_mask=queries))
    queries[0, 0] = ~queries[0, 0]
    assert block_masks.remembered_block_mask(asked(keys, query_mask=queries)) is not other


def test_lengths_and_segments_are_remembered_by_the_callers_tensors():
    lengths = torch.tensor([100, 140])
    first = block_masks.remembered_block_mask(AttentionCall(*make(2, 140, 140), key_lengths=lengths, causal=True))
    assert block_masks.remembered_block_mask(AttentionCall(*make(2, 140, 140), key_lengths=lengths, causal=True)) is first
    lengths[0] = 99
    assert block_masks.remembered_block_mask(AttentionCall(*make(2, 140, 140), key_lengths=lengths, causal=True)) is not first
    call = AttentionCall(*make(2, 140, 140), key_lengths=lengths, causal=True)
    shorter = call.replaced(key_lengths=torch.tensor([1, 1], dtype=torch.int32))
    assert block_masks.remembered_block_mask(shorter) is not block_masks.remembered_block_mask(call)
    cu = torch.tensor([0, 70, 140], dtype=torch.int32)
    first = block_masks.remembered_block_mask(AttentionCall(*make(1, 140, 140), cu_seqlens=(cu, cu)))
    assert block_masks.remembered_block_mask(AttentionCall(*make(1, 140, 140), cu_seqlens=(cu, cu))) is first


def test_sizes_alone_are_remembered_but_not_for_ever():
    plain = AttentionCall(*make(2, 140, 140), causal=True)
    first = block_masks.remembered_block_mask(plain)
    assert block_masks.remembered_block_mask(plain) is first
    with torch.inference_mode():
        inside = block_masks.remembered_block_mask(plain)
    assert inside is not first and not first.kv_indices.is_inference()
    for length in range(1, block_masks._LIMIT + 1):
        block_masks.remembered_block_mask(AttentionCall(*make(1, 2, 3 + length), causal=True))
    assert len(block_masks._plain) == block_masks._LIMIT
    assert block_masks.remembered_block_mask(plain) is not first


def test_a_dead_mask_takes_its_block_mask_along():
    mask = torch.rand(2, 140) < 0.7
    block_masks.remembered_block_mask(asked(mask, query_mask=mask, causal=True))
    before = len(block_masks._by_tensor)
    del mask
    gc.collect()
    assert len(block_masks._by_tensor) < before


# ---------------------------------------------------------------------- compiled

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
STRUCTURES = {
    "causal, more keys": (make(2, 50, 140), {"causal": True}),
    "window, softcap, scale": (
        make(1, 200, 200, dim=20, value_dim=6),
        {"causal": True, "window": (20, None), "softcap": 2.0, "scale": 0.3},
    ),
    "padding on both sides": (
        make(3, 130, 130),
        {
            "causal": True,
            "key_mask": torch.arange(130)[None] >= torch.tensor([[0], [100], [130]]),
            "query_mask": torch.arange(130)[None] >= torch.tensor([[0], [100], [130]]),
        },
    ),
    "lengths and starts": (
        make(2, 30, 150),
        {"causal": True, "key_lengths": [150, 20], "query_lengths": [30, 25], "key_starts": [3, 0]},
    ),
    "packed, alibi": (
        make(1, 150, 160),
        {
            "causal": True,
            "alibi_slopes": SLOPES,
            "cu_seqlens": (torch.tensor([0, 20, 20, 140], dtype=torch.int32), torch.tensor([0, 5, 30, 150], dtype=torch.int32)),
        },
    ),
    "mask and bias": (
        make(2, 40, 50),
        {
            "mask": torch.rand(2, 1, 40, 50, generator=torch.Generator().manual_seed(1)) < 0.6,
            "bias": torch.randn(1, 4, 1, 50, generator=torch.Generator().manual_seed(2)).masked_fill(torch.arange(50) == 7, float("-inf")),
        },
    ),
    "one row": (make(1, 30, 140), {"causal": True, "key_lengths": [90], "query_lengths": [20], "softcap": 3.0}),
    "one query, half precision": (make(3, 1, 140, dtype=torch.bfloat16), {"causal": True, "key_lengths": [140, 1, 0]}),
    "nothing": (make(1, 20, 20, heads=2), {}),
}

QUICK = ("window, softcap, scale", "padding on both sides", "packed, alibi", "one row", "one query, half precision")

needs_a_compiler = pytest.mark.skipif(
    any(reason.what == "missing" for reason in flex.reasons_against(AttentionCall(*make(1, 2, 2)).spec)), reason="no C++ compiler"
)


@needs_a_compiler
@pytest.mark.parametrize("name", always(QUICK, STRUCTURES))
def test_compiled_on_a_cpu_equals_the_reference(name):
    tensors, options = STRUCTURES[name]
    output = attnreg.attention(*poison(tensors, options), **options, backend="flex")
    right = attnreg.attention(*tensors, **options, backend="reference")
    bound = 2e-6 if output.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(output, right, atol=bound, rtol=bound)


@needs_a_compiler
def test_other_numbers_and_lengths_need_no_new_compilation():
    from torch._dynamo.utils import counters

    def run(length, window, softcap, scale):
        tensors = make(2, length, length)
        options = {"causal": True, "window": (window, None), "softcap": softcap, "scale": scale}
        mine = attnreg.attention(*tensors, **options, backend="flex")
        torch.testing.assert_close(mine, attnreg.attention(*tensors, **options, backend="reference"), atol=2e-6, rtol=2e-6)

    before = counters["stats"]["unique_graphs"]
    kinds = len(_compiled)
    for step in range(4):
        run(150, 10 + step, 2.0 + step, 0.3 + 0.1 * step)
    assert counters["stats"]["unique_graphs"] - before == 1
    for length in (170, 190, 200, 230):
        run(length, 7, 3.0, 0.2)
    assert counters["stats"]["unique_graphs"] - before == 2
    assert len(_compiled) - kinds == 1


@needs_a_compiler
def test_rows_and_lengths_of_a_bias_may_all_change():
    for batch, query_length, key_length in ((2, 40, 50), (3, 60, 70), (2, 50, 66)):
        tensors = make(batch, query_length, key_length)
        bias = torch.randn(batch, 4, query_length, key_length)
        output = attnreg.attention(*tensors, bias=bias, backend="flex")
        torch.testing.assert_close(output, attnreg.attention(*tensors, bias=bias, backend="reference"), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("options", "apart"),
    [
        ({"causal": True, "softcap": 2.0, "scale": 0.3, "window": (9, None), "alibi_slopes": torch.rand(4)}, False),
        ({"alibi_slopes": torch.rand(2, 4)}, True),
        ({"key_lengths": [3, 4]}, True),
        ({"mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)}, True),
    ],
    ids=["numbers", "slopes of rows", "lengths", "mask"],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sizes_of_what_the_mods_read_are_no_symbols_on_a_cpu(options, apart, device, monkeypatch):
    asked = []
    monkeypatch.setattr(flex_module, "_compiled", {})
    monkeypatch.setattr(torch, "compile", lambda function, dynamic, **given: asked.append(dynamic) or function)
    for length in (40, 50):
        call = AttentionCall(*make(2, length, length), **options)
        call._spec = call.spec._replace(device=device)
        flex_module._attend_for(call)
        assert any("kind and size" in note for note in flex.notes(call.spec)) == (apart and device == "cpu")
    assert asked == ([False, False] if apart and device == "cpu" else [None])


def test_inside_somebody_elses_compiled_region(uncompiled):
    """Traced whole, without a graph break; what follows in CUDA's compiler is not shown here."""

    def layer(query, key, value, mask, cu):
        padded = attnreg.attention(
            query, key, value, causal=True, key_mask=mask, query_mask=mask, softcap=3.0, scale=0.2, backend=uncompiled
        )
        packed = attnreg.attention(query[:1], key[:1], value[:1], causal=True, window=(9, None), cu_seqlens=(cu, cu), backend=uncompiled)
        return padded, packed

    traced = torch.compile(layer, fullgraph=True, backend="eager")
    for length in (140, 260):
        arguments = (*make(2, length, length), torch.rand(2, length) < 0.7, torch.tensor([0, 40, length - 3], dtype=torch.int32))
        for mine, right in zip(traced(*arguments), layer(*arguments)):
            torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------- what it refuses


def refused(tensors, **options):
    selection = attnreg.explain(*tensors, **options, backend="flex")
    return {reason.what: reason for reason in selection.rejected.get("flex", ())}


@needs_a_compiler
def test_what_a_cpu_can_not_do_is_refused_with_the_reason():
    query, key, value = make(1, 3, 3)
    assert not refused((query, key, value), causal=True)
    assert "only on CUDA" in refused((query, key, value), return_lse=True)["lse"].supported
    assert "only on CUDA" in refused((query, key, value), sinks=torch.zeros(4))["sinks"].supported
    assert "forward only" in refused((query.requires_grad_(), key, value))["backward"].supported
    assert set(refused((query.detach(), key, value), dropout_p=0.1)) == {"dropout"}
    with pytest.raises(Exception, match="can't join its CPU kernel"):
        torch.compile(lambda *t: attnreg.attention(*t, backend="flex"), backend="eager", fullgraph=True)(query.detach(), key, value)


@needs_a_compiler
def test_tensors_that_could_need_a_gradient_are_taken_under_no_grad():
    query, key, value = (t.requires_grad_() for t in make(1, 20, 20, heads=2))
    with torch.no_grad():
        mine = attnreg.attention(query, key, value, backend="flex")
        torch.testing.assert_close(mine, attnreg.attention(query, key, value, backend="reference"), atol=2e-6, rtol=2e-6)


def test_a_cpu_takes_it_only_when_asked_and_cuda_ranks_it_behind_the_fused_kernels():
    spec = AttentionCall(*make(1, 3, 3)).spec
    assert flex.rank(spec) < 0 and flex.rank(spec._replace(device="cuda")) > 0
    cuda = spec._replace(device="cuda", capability=(9, 0), dtype=torch.bfloat16, head_dim=8, value_dim=8)
    assert any("pads head dims below 16" in note for note in flex.notes(cuda))


@needs_a_compiler
def test_a_small_call_on_a_cpu_is_not_worth_compiling():
    def order(size):
        selection = attnreg.explain(*(torch.empty(1, size, 8, 16) for _ in range(3)), softcap=20.0)
        return [selection.chosen.name, *selection.able]

    small, large = order(512), order(2048)
    assert small.index("reference") < small.index("flex")
    assert large.index("flex") < large.index("reference")


@pytest.mark.parametrize(
    ("dtype", "learned", "stages"), [(torch.bfloat16, False, None), (torch.float32, False, 1), (torch.bfloat16, True, 1)]
)
def test_one_tile_of_a_wide_bias_is_in_flight_on_a_card(dtype, learned, stages):
    query, key, value = (torch.zeros(1, 2, 3, 16, dtype=torch.bfloat16) for _ in range(3))
    call = AttentionCall(query, key, value, bias=torch.zeros(1, 1, 3, 3, dtype=dtype, requires_grad=learned), layout="bhsd")
    call._spec = call.spec._replace(device="cuda", capability=(9, 0))
    seen = []

    def attend(*arguments):
        seen.append(arguments[-1])
        return value, None

    run_flex(call, attend)
    assert seen == [stages and {"num_stages": stages}]


@pytest.mark.parametrize(("queries", "heads", "forced"), [(32, 8, False), (33, 8, True), (96, 8, True), (96, 2, False), (200, 8, True)])
def test_queries_of_a_group_beyond_one_tile_leave_the_kernel_for_decoding(queries, heads, forced):
    query, key, value = (torch.zeros(1, n, queries, 16, dtype=torch.bfloat16) for n in (heads, 2, 2))
    call = AttentionCall(query, key, value, layout="bhsd")
    seen = []
    for device in ("cpu", "cuda"):
        call._spec = call.spec._replace(device=device, capability=(9, 0))
        run_flex(call, lambda *arguments: (seen.append(arguments[-1]), (query, None))[1])
    assert seen == [None, {"FORCE_USE_FLEX_ATTENTION": True} if forced else None]


def test_what_the_kernel_reads_is_a_buffer_of_its_own_inside_of_a_compiled_region():
    graphs = []

    def looked_at(graph, _):
        graphs.append(graph.print_readable(print_output=False))
        return graph

    tensor = torch.randn(3, requires_grad=True)
    compiled = torch.compile(lambda t: block_masks.read_in_kernel(2 * t), backend=looked_at, fullgraph=True)
    output = compiled(tensor)
    assert torch.equal(output, 2 * tensor) and "attnreg.settled" in graphs[0]
    assert torch.equal(torch.autograd.grad(output.sum(), tensor)[0], torch.full((3,), 2.0))
    assert block_masks.read_in_kernel(tensor) is tensor


def test_a_block_mask_lies_densely_in_a_compiled_region():
    """The kernel steps over the rows of a batch by the stride of the heads, which the compiler chooses for what it computes itself."""
    graphs = []

    def looked_at(graph, _):
        graphs.append(graph)
        return graph

    def made(query, key, key_mask, mask):
        blocks = block_masks.block_mask(AttentionCall(query, key, key, key_mask=key_mask, mask=mask, causal=True))
        return tuple(getattr(blocks, name) for name in block_masks._OF_BLOCKS)

    query, key, _ = make(2, 300, 300)
    arguments = (query, key, torch.rand(2, 300) < 0.5, torch.rand(2, 1, 1, 300) < 0.7)
    compiled = torch.compile(made, backend=looked_at, fullgraph=True)(*arguments)
    assert all(torch.equal(mine, right) for mine, right in zip(compiled, made(*arguments)))
    (outputs,) = (node.args[0] for node in graphs[0].graph.nodes if node.op == "output")
    assert len(outputs) == 8 and all("settled" in str(node.target) for node in outputs)


def test_kinds_that_are_compiled_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(flex_module, "LIMIT", 2)
    monkeypatch.setattr(flex_module, "_compiled", {})
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    for size in range(2, 8):
        tensors = [torch.zeros(1, 2, size, 16) for _ in range(3)]
        flex_module._attend_for(AttentionCall(*tensors, layout="bhsd", key_mask=torch.ones(1, size, dtype=torch.bool)))
        assert 1 <= len(flex_module._compiled) <= 2


@pytest.mark.parametrize("keys", [8, 24])
@pytest.mark.parametrize("dim", [8, 16])
def test_narrow_heads_on_a_cpu_with_eight_keys_left_over(dim, keys):
    """torch 2.13's kernel, compiled, writes past the end of its buffer there."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 9, 2, dim), torch.randn(2, keys, 2, dim), torch.randn(2, keys, 2, dim)
    with torch.no_grad():
        for _ in range(3):
            output = attnreg.attention(query, key, value, softcap=20.0, backend="flex")
    torch.testing.assert_close(output, attnreg.attention(query, key, value, softcap=20.0, backend="reference"), atol=1e-5, rtol=1e-5)
    told = attnreg.explain(query, key, value, softcap=20.0, backend="flex").notes
    assert any("pads head dims below 24" in note for note in told)
