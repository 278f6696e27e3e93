"""The call under torch.compile: one graph, few compilations, and a policy that takes effect at once."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import attnreg
from attnreg import selections


class Compiled:
    """A function under torch.compile(fullgraph=True) with its compilations, selections and graphs counted."""

    def __init__(self, function, monkeypatch):
        torch._dynamo.reset()
        self.counter = CompileCounterWithBackend("eager")
        self.selections = 0
        select = selections.select

        def counted(*args):
            self.selections += 1
            return select(*args)

        monkeypatch.setattr(selections, "select", counted)
        self.function = torch.compile(function, fullgraph=True, backend=self.counter)

    def __call__(self, *args):
        return self.function(*args)


def tensors(batch, queries, keys, heads=4, key_heads=2, dim=8):
    return torch.randn(batch, queries, heads, dim), torch.randn(batch, keys, key_heads, dim), torch.randn(batch, keys, key_heads, dim)


GROWING = {
    "decode": (lambda n: tensors(2, 1, n), {"causal": True}),
    "prefill": (lambda n: tensors(2, n, n), {"causal": True}),
    "chunk": (lambda n: tensors(2, 3, n + 2), {"causal": True}),
    "window": (lambda n: tensors(2, n, n + 4), {"causal": True, "window": (3, None)}),
}


@pytest.mark.parametrize("name", GROWING)
def test_growing_lengths_compile_twice_at_most(name, monkeypatch):
    make, options = GROWING[name]
    compiled = Compiled(lambda q, k, v: attnreg.attention(q, k, v, **options), monkeypatch)
    for length in range(1, 65):
        call = make(length)
        output = compiled(*call)
        if length in (1, 2, 3, 40, 64):
            selections = compiled.selections
            torch.testing.assert_close(output, attnreg.attention(*call, **options))
            compiled.selections = selections
    assert compiled.counter.frame_count <= 2 and compiled.selections <= 8


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_a_mask_is_taken_where_lengths_are_symbolic_already(name, monkeypatch):
    compiled = Compiled(lambda q, k, v, options: attnreg.attention(q, k, v, **options), monkeypatch)
    for length in (5, 6):
        compiled(*tensors(2, length, length), {})
    call, random = tensors(2, 6, 6), torch.randn(1, 1, 6, 6)
    options = {name: random > 0 if name == "mask" else random}
    torch.testing.assert_close(compiled(*call, options), attnreg.attention(*call, **options))


TENSORS = {
    "both masks": lambda: {"causal": True, "key_mask": torch.rand(1, 9) > 0.3, "query_mask": torch.rand(1, 9) > 0.3},
    "a declared padding": lambda: {"key_mask": attnreg.Padding.from_lengths(torch.tensor([6]), 9)},
    "a mask and an lse": lambda: {"mask": torch.rand(1, 1, 9, 9) > 0.3, "return_lse": True},
    "a bias": lambda: {"bias": torch.randn(1, 4, 9, 9)},
    "lengths": lambda: {"causal": True, "key_lengths": torch.tensor([7])},
    "starts": lambda: {"key_starts": torch.tensor([2])},
    "packed rows": lambda: {"causal": True, "cu_seqlens": (torch.tensor([0, 4, 9]), torch.tensor([0, 4, 9]))},
    "alibi and sinks": lambda: {"causal": True, "alibi_slopes": torch.rand(4), "sinks": torch.randn(4)},
    "the reference": lambda: {"causal": True, "softcap": 3.0, "backend": "reference"},
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_option_traces(name, monkeypatch):
    options, call = TENSORS[name](), tensors(1, 9, 9)
    given = {n: v for n, v in options.items() if isinstance(v, torch.Tensor)}
    fixed = {n: v for n, v in options.items() if n not in given}
    compiled = Compiled(lambda q, k, v, given: attnreg.attention(q, k, v, **given, **fixed), monkeypatch)
    torch.testing.assert_close(compiled(*call, given), attnreg.attention(*call, **options))
    for graph in compiled.counter.graphs:
        targets = {node.target for node in graph.graph.nodes if node.op == "call_function"}
        assert not [t for t in targets if "attnreg" in getattr(t, "__module__", "")], "the graph calls back into Python"


def test_the_graph_holds_only_operators():
    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    call = tensors(2, 16, 16)
    torch.compile(lambda q, k, v: attnreg.attention(q, k, v, causal=True), fullgraph=True, backend=aot_autograd(fw_compiler=keep))(*call)
    targets = [
        node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function" and "getitem" not in str(node.target)
    ]
    assert targets and all(isinstance(target, torch._ops.OpOverload) for target in targets)
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default in targets


def test_gradients_through_a_compiled_call():
    torch._dynamo.reset()
    call = [t.requires_grad_() for t in tensors(2, 8, 8)]
    compiled = torch.compile(lambda q, k, v: attnreg.attention(q, k, v, causal=True), fullgraph=True, backend="aot_eager")
    grads = torch.autograd.grad(compiled(*call).square().sum(), call)
    torch.testing.assert_close(grads, torch.autograd.grad(attnreg.attention(*call, causal=True).square().sum(), call))


def test_a_changed_policy_takes_effect_at_the_next_call(monkeypatch):
    call = tensors(2, 8, 8)
    compiled = Compiled(lambda q, k, v: attnreg.attention(q, k, v, causal=True), monkeypatch)

    def names():
        compiled(*call)
        targets = [str(n.target) for n in compiled.counter.graphs[-1].graph.nodes]
        return "sdpa" if any("flash_attention_for_cpu" in t for t in targets) else "reference"

    assert names() == "sdpa"
    attnreg.use("reference")
    try:
        assert names() == "reference"
    finally:
        attnreg.use(None)
    with attnreg.using("reference"):
        before = compiled.counter.frame_count
        compiled(*call)
        compiled(*call)
    assert compiled.counter.frame_count <= before + 1


def test_errors_keep_their_reasons(monkeypatch):
    compiled = Compiled(lambda q, k, v: attnreg.attention(q, k, v, softcap=2.0, dropout_p=0.1, backend="sdpa"), monkeypatch)
    with pytest.raises(Exception, match="softcap: not claimed"):
        compiled(*tensors(1, 4, 4))
