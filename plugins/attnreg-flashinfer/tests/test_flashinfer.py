"""The conformance suite where the library runs; the mapping everywhere, by doubles of its two wrappers on the CPU.

The doubles take what flashinfer-python 0.7.4's `plan` and `run` take, check what those demand, and give a row that sees nothing what the
kernel might: numbers that must not be seen.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import types
import typing

import attnreg_flashinfer
import pytest
import torch

import attnreg
from attnreg import AttentionCall, Feature, Pages
from attnreg.conformance import conformance_suite

TestFlashinfer = conformance_suite("flashinfer")


def attended(query, key, value, options):
    """One segment as the kernel does it: output, lse to base 2, rubbish where nothing is seen."""
    window = None if options["window_left"] < 0 else (options["window_left"], None)
    output, lse = attnreg.attention(
        query[None], key[None], value[None], causal=options["causal"], window=window, scale=options["sm_scale"], return_lse=True,
        backend="reference",
    )  # fmt: skip
    blind = lse == float("-inf")
    output = output.masked_fill(blind.transpose(1, 2)[..., None], 7.0)
    return output[0], (lse / math.log(2)).masked_fill(blind, -5e4)[0].T


def readable(*tensors):
    """As the kernels read: 16 bytes at a time, along a last dimension of stride 1. They check none of it."""
    for tensor in tensors:
        assert tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0
        assert not any(step * tensor.element_size() % 16 for step in tensor.stride()[:-1])


class Wrapper:
    made: typing.ClassVar[list[Wrapper]] = []

    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend="auto", use_tensor_cores=False):
        assert float_workspace_buffer.dtype == torch.uint8 and not float_workspace_buffer.any() and kv_layout == "NHD"
        self.backend, self.plans = backend, 0
        Wrapper.made.append(self)

    def finish(self, results, return_lse):
        output, lse = (torch.cat(parts) for parts in zip(*results))
        return (output, lse) if return_lse else output


class Ragged(Wrapper):
    def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, *, causal=False, window_left=-1,
             sm_scale=None, q_data_type="float16", kv_data_type=None):  # fmt: skip
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32 and qo_indptr.device.type == kv_indptr.device.type == "cpu"
        self.ends, self.dims = (qo_indptr.tolist(), kv_indptr.tolist()), (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        self.options = {"causal": causal, "window_left": window_left, "sm_scale": sm_scale}
        self.plans += 1

    def run(self, q, k, v, *, return_lse=False):
        readable(q, k, v)
        assert (q.shape[1], k.shape[1], q.shape[2], v.shape[2]) == self.dims
        of_query, of_key = self.ends
        assert q.shape[0] == of_query[-1] and k.shape[0] == v.shape[0] == of_key[-1]
        parts = zip(of_query, of_query[1:], of_key, of_key[1:])
        return self.finish([attended(q[a:b], k[c:d], v[c:d], self.options) for a, b, c, d in parts], return_lse)


class Decode(Wrapper):
    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, window_left=-1, sm_scale=None,
             q_data_type="float16", kv_data_type=None):  # fmt: skip
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert len(indices) == indptr[-1] and bool(((last_page_len >= 1) & (last_page_len <= page_size)).all())
        self.pages = [indices[a:b].tolist() for a, b in zip(indptr.tolist(), indptr[1:].tolist())]
        self.last, self.size = last_page_len.tolist(), page_size
        self.options = {"causal": True, "window_left": window_left, "sm_scale": sm_scale}
        self.plans += 1

    def run(self, q, paged_kv_cache, *, return_lse=False):
        readable(q, *paged_kv_cache)
        keys, values = paged_kv_cache
        assert keys.stride() == values.stride(), "one set of strides serves both"
        results = []
        for row, pages, last in zip(q, self.pages, self.last):
            keys, values = (pool[pages].flatten(0, 1)[: (len(pages) - 1) * self.size + last] for pool in paged_kv_cache)
            results.append(attended(row[None], keys, values, self.options))
        return self.finish(results, return_lse)


@pytest.fixture
def library(monkeypatch):
    doubles = types.SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=Ragged, BatchDecodeWithPagedKVCacheWrapper=Decode)
    monkeypatch.setattr(attnreg_flashinfer, "WORKSPACE", 16)
    monkeypatch.setattr(attnreg_flashinfer, "_plans", {})
    monkeypatch.setattr(attnreg_flashinfer, "_workspaces", {})
    monkeypatch.setattr(Wrapper, "made", [])
    monkeypatch.setitem(sys.modules, "flashinfer", doubles)


def tensors(batch, queries, keys, heads=4, key_heads=2, dim=64):
    return torch.randn(batch, queries, heads, dim), torch.randn(batch, keys, key_heads, dim), torch.randn(batch, keys, key_heads, dim)


def same_as_reference(given, **options):
    call = AttentionCall(*given, return_lse=True, **options)
    assert all(reason.what in ("missing", "device", "dtype") for reason in attnreg_flashinfer.flashinfer.reasons_against(call.spec))
    got = attnreg_flashinfer.run_flashinfer(call)
    expected = attnreg.attention(*given, return_lse=True, backend="reference", **options)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    # Without the lse: the same output.
    torch.testing.assert_close(attnreg_flashinfer.run_flashinfer(AttentionCall(*given, **options)), expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [(5, 5), (3, 7), (7, 3), (1, 6)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (2, None), "scale": 0.3}])
def test_plain_batches(library, lengths, options):
    same_as_reference(tensors(2, *lengths), **options)


LAYOUTS = {
    "spread": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "odd rows": lambda t: torch.nn.functional.pad(t, (0, 1))[..., :-1],
    "odd start": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_kernels_cannot_read_is_copied(library, layout):
    given = [LAYOUTS[layout](t) for t in tensors(2, 5, 5)]
    same_as_reference(given, causal=True)
    call = paged([3, 6])
    pages = Pages(*map(LAYOUTS[layout], (call.pages.keys, call.pages.values)), call.pages.block_table)
    got = attnreg_flashinfer.run_flashinfer(call.replaced(query=LAYOUTS[layout](call.query), pages=pages))
    torch.testing.assert_close(got, attnreg_flashinfer.run_flashinfer(call))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_keys_and_of_values_that_lie_differently(library, layout):
    call = paged([3, 6])
    pages, apart = call.pages, torch.nn.functional.pad(call.pages.values, (0, 64))[..., :64]
    expected = attnreg_flashinfer.run_flashinfer(call)
    for keys, values in ((pages.keys, apart), (LAYOUTS[layout](pages.keys), pages.values), (LAYOUTS[layout](pages.keys), apart)):
        got = attnreg_flashinfer.run_flashinfer(call.replaced(pages=Pages(keys, values, pages.block_table)))
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("longest", [None, (4, 5)])
def test_packed_rows_with_empty_segments_and_a_tail(library, causal, longest):
    cu = torch.tensor([0, 4, 4, 6, 7]), torch.tensor([0, 2, 5, 5, 10])
    given = tensors(1, 9, 11)
    given[1][:, 10:], given[2][:, 10:], given[0][:, 7:] = (float("nan"),) * 3
    same_as_reference(given, cu_seqlens=cu, max_seqlens=longest, causal=causal)


def test_padding_is_dropped_where_that_changes_nothing(library):
    padding = attnreg.Padding.from_lengths([4, 0, 6], 6, "right")
    same_as_reference(tensors(3, 6, 6), key_mask=padding, query_mask=padding, causal=True)
    bare = torch.tensor([[True, False, True, True]])
    call = AttentionCall(*tensors(1, 4, 4), key_mask=bare, causal=True)
    assert Feature.KEY_MASK in [reason.what for reason in attnreg_flashinfer.flashinfer.reasons_against(call.spec)]


def test_lengths_that_the_host_knows_are_not_read_from_the_device(library):
    """Reading waits for the device, in each layer of a forward whose mask is declared anew."""
    given = tensors(3, 6, 6)
    for lengths in ([4, 0, 6], [4, 0, 6], [4, 1, 6]):
        padding = attnreg.Padding.from_lengths(lengths, 6, "left")
        attnreg_flashinfer.run_flashinfer(AttentionCall(*given, key_mask=padding, query_mask=padding, causal=True))
        same_as_reference(given, key_mask=padding, query_mask=padding, causal=True)
    assert [plan.sources for plan in attnreg_flashinfer._plans.values()] == [()]
    assert [wrapper.plans for wrapper in Wrapper.made] == [2]


def paged(lengths, size=4, heads=8, window=None, return_lse=True):
    batch, columns = len(lengths), max(-(-max(lengths) // size), 1)
    table = torch.randperm(batch * columns).to(torch.int32).reshape(batch, columns)
    pools = [torch.randn(batch * columns, size, 2, 64) for _ in range(2)]
    query = torch.randn(batch, 1, heads, 64)
    given = {"pages": Pages(*pools, table), "key_lengths": torch.tensor(lengths), "causal": True, "window": window}
    return AttentionCall(query, None, None, return_lse=return_lse, **given)


@pytest.mark.parametrize("window", [None, (3, None)])
@pytest.mark.parametrize("lengths", [[1, 4, 5, 11], [8, 8], [0, 3], [0, 0]])
def test_pages(library, lengths, window):
    call = paged(lengths, window=window)
    got = attnreg_flashinfer.run_flashinfer(call)
    dense = call.replaced()
    dense.gather_pages()
    options = {"key_lengths": call.key_lengths, "causal": True, "window": window, "return_lse": True, "backend": "reference"}
    torch.testing.assert_close(got, attnreg.attention(call.query, dense.key, dense.value, **options), rtol=1e-5, atol=1e-5)
    assert all(r.what in ("missing", "device", "dtype") for r in attnreg_flashinfer.flashinfer.reasons_against(call.spec))


def test_pages_all_of_whose_slots_count(library):
    call = paged([8, 8])
    expected = attnreg_flashinfer.run_flashinfer(call)
    whole = Pages(call.pages.keys, call.pages.values, call.pages.block_table, 8)
    for _ in range(2):
        torch.testing.assert_close(attnreg_flashinfer.run_flashinfer(call.replaced(pages=whole, key_lengths=None)), expected)
    (wrapper,) = Wrapper.made
    assert wrapper.plans == 2, "no plan for each call: nothing is new"


def test_a_plan_waits_until_the_one_before_is_copied(library, monkeypatch):
    """The wrapper's page-locked buffer is copied to the device when the stream comes to it; the next plan writes over it at once."""
    order = []
    mark = types.SimpleNamespace(synchronize=lambda: order.append("wait"))
    monkeypatch.setattr(attnreg_flashinfer, "_mark", lambda device: mark)
    plan = Ragged.plan
    monkeypatch.setattr(Ragged, "plan", lambda *arguments, **options: (order.append("plan"), plan(*arguments, **options)))
    for size in (3, 3, 4):
        attnreg_flashinfer.run_flashinfer(AttentionCall(*tensors(2, size, size)))
    assert order == ["plan", "wait", "plan"]


@pytest.mark.parametrize("pages", [False, True])
def test_tensors_that_count_no_versions_are_read_again(library, pages):
    with torch.inference_mode():
        given, cu, call = tensors(1, 6, 6), torch.tensor([0, 2, 6]), paged([3, 6])
        for change in (1, 3):
            if pages:
                call.key_lengths[0] = change
                got = attnreg_flashinfer.run_flashinfer(call)
                fresh = call.replaced(key_lengths=call.key_lengths.clone())
                torch.testing.assert_close(got, attnreg_flashinfer.run_flashinfer(fresh))
            else:
                cu[1] = change
                same_as_reference(given, cu_seqlens=(cu, cu))


def test_threads_do_not_run_each_others_plans(library, monkeypatch):
    run = Ragged.run

    def slow(self, *arguments, **options):
        time.sleep(0.05)
        return run(self, *arguments, **options)

    monkeypatch.setattr(Ragged, "run", slow)
    failed = []

    def work(size):
        try:
            same_as_reference(tensors(2, size, size))
        except AssertionError as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(size,)) for size in (3, 4, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_plans_once_for_what_stays_the_same(library):
    given, cu = tensors(1, 6, 6), torch.tensor([0, 2, 6])
    for _ in range(3):
        attnreg_flashinfer.run_flashinfer(AttentionCall(*given, cu_seqlens=(cu, cu)))
    (wrapper,) = Wrapper.made
    assert wrapper.plans == 1 and wrapper.backend == "fa2"
    attnreg_flashinfer.run_flashinfer(AttentionCall(*given, cu_seqlens=(cu.clone(), cu)))
    assert wrapper.plans == 1, "the same numbers in another tensor"
    cu[1] = 3
    same_as_reference(given, cu_seqlens=(cu, cu))
    attnreg_flashinfer.run_flashinfer(AttentionCall(*given, cu_seqlens=(cu, cu)))
    assert wrapper.plans == 2, "numbers changed in place are seen"
    other = tensors(2, 3, 3)
    attnreg_flashinfer.run_flashinfer(AttentionCall(*other))
    attnreg_flashinfer.run_flashinfer(AttentionCall(*other, causal=True))
    assert len(Wrapper.made) == 2 and wrapper.plans == 3, "causality is another wrapper, other sizes another plan"


def test_a_step_further_in_the_pages_plans_anew_and_its_layers_share_it(library):
    call = paged([3, 6], return_lse=False)
    for lengths in ([3, 6], [4, 7]):
        for _ in range(2):
            attnreg_flashinfer.run_flashinfer(call.replaced(key_lengths=torch.tensor(lengths)))
    (wrapper,) = Wrapper.made
    assert wrapper.plans == 2


def test_a_plan_that_fails_leaves_no_half_planned_wrapper(library, monkeypatch):
    given = tensors(2, 3, 3)
    attnreg_flashinfer.run_flashinfer(AttentionCall(*given))
    with monkeypatch.context() as broken:
        broken.setattr(Ragged, "plan", lambda self, *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            attnreg_flashinfer.run_flashinfer(AttentionCall(*tensors(2, 4, 4)))
    assert not attnreg_flashinfer._plans
    same_as_reference(given)


on_a_card = pytest.mark.skipif(
    not torch.cuda.is_available() or bool(attnreg_flashinfer.flashinfer.reason_missing), reason="needs FlashInfer and a CUDA device"
)


@on_a_card
@pytest.mark.parametrize("window", [None, (3, None)])
@pytest.mark.parametrize("heads", [2, 4, 8])  # a group of 4 takes the kernel for tensor cores
@pytest.mark.parametrize(("lengths", "size"), [([1, 4, 5, 11], 4), ([300, 17, 0, 64], 16), ([0, 0], 4)])
def test_pages_by_the_library(lengths, size, heads, window):
    call = paged(lengths, size, heads, window)
    pools, table = (call.pages.keys, call.pages.values), call.pages.block_table
    query, *pools = (t.to("cuda", torch.bfloat16) for t in (call.query, *pools))
    pages = Pages(*pools, table.cuda())
    call = AttentionCall(query, None, None, pages=pages, key_lengths=call.key_lengths.cuda(), causal=True, window=window, return_lse=True)
    output, lse = attnreg_flashinfer.run_flashinfer(call)
    dense = call.replaced()
    dense.gather_pages()
    options = {"key_lengths": call.key_lengths, "causal": True, "window": window, "return_lse": True, "backend": "reference"}
    wanted, wanted_lse = attnreg.attention(query.double(), dense.key.double(), dense.value.double(), **options)
    allowed = 8 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(output.double(), wanted, rtol=0, atol=allowed * max(1.0, float(dense.value.abs().max())))
    torch.testing.assert_close(lse.double(), wanted_lse.double(), rtol=allowed, atol=allowed)


@on_a_card
def test_plans_made_ahead_of_the_card():
    """The card is kept busy, so that no plan is copied to it before the next one is made."""
    random = torch.Generator("cuda").manual_seed(0)
    made = lambda *shape: torch.randn(shape, generator=random, device="cuda", dtype=torch.bfloat16)
    given = [(made(n, 40 * n, 4, 64), made(n, 40 * n, 2, 64), made(n, 40 * n, 2, 64)) for n in (1, 3, 2, 5, 1, 4)]
    attnreg.attention(*given[0], causal=True, backend="flashinfer")
    torch.cuda._sleep(2_000_000_000)
    outputs = [attnreg.attention(*each, causal=True, backend="flashinfer") for each in given]
    for each, output in zip(given, outputs):
        wanted = attnreg.attention(*(t.double() for t in each), causal=True, backend="reference")
        torch.testing.assert_close(output.double(), wanted, rtol=0, atol=8 * torch.finfo(torch.bfloat16).eps * 4)


@on_a_card
def test_a_paged_cache_steps_on_by_the_library():
    """Two layers and four steps: what the plan of the last step holds must never serve the next."""
    cache = attnreg.PagedCache(2, 3, 32, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
    random = torch.Generator("cuda").manual_seed(0)
    past = [None, None]
    for count in (5, 1, 1, 1):
        for layer in range(2):
            query, key, value = (
                torch.randn(3, count, heads, 64, generator=random, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)
            )
            past[layer] = (key, value) if past[layer] is None else tuple(torch.cat(p, 1) for p in zip(past[layer], (key, value)))
            backend = "flashinfer" if count == 1 else "reference"
            got = attnreg.attention(query, key, value, cache=cache[layer], causal=True, backend=backend)
            wanted = attnreg.attention(query.double(), *(t.double() for t in past[layer]), causal=True, backend="reference")
            torch.testing.assert_close(got.double(), wanted, rtol=0, atol=8 * torch.finfo(torch.bfloat16).eps * 4)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"window": (True, False)}, "window"),
        ({"page_size": 16}, "paged"),
        ({"head_dim": 96, "value_dim": 96}, "head_dim"),
        ({"gradients": ("query",)}, "backward"),
        ({"value_dim": 128}, "value_dim"),
        ({"capability": (7, 5)}, "capability"),
        ({"softcap": True}, "softcap"),
    ],
)
def test_what_is_not_claimed_is_refused(changes, what):
    spec = attnreg.AttentionSpec("cuda", (9, 0), torch.bfloat16, 8, 2, 64, 64)
    claims = attnreg_flashinfer.flashinfer.claims
    assert claims.reasons_against(spec) == ()
    assert what in [reason.what for reason in claims.reasons_against(spec._replace(**changes))]
