"""Padding and packed rows; whether dropping padding changes what is seen, against counting it slot by slot."""

import copy
import gc
import itertools
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import attnreg
from attnreg import packing
from attnreg.call import AttentionCall


def test_segments_from_documents_positions_and_lengths():
    assert packing.cu_seqlens_from_lengths([3, 1, 0, 2]).tolist() == [0, 3, 4, 4, 6]
    assert packing.cu_seqlens_from_documents(torch.tensor([7, 7, 2, 2, 2, -1])).tolist() == [0, 2, 5]
    assert packing.cu_seqlens_from_documents(torch.tensor([[0, 1], [1, 1]])).tolist() == [0, 1, 2, 4]
    assert packing.cu_seqlens_from_positions(torch.tensor([0, 1, 2, 0, 1])).tolist() == [0, 3, 5]
    with pytest.raises(ValueError, match="document_ids"):
        packing.cu_seqlens_from_documents(torch.tensor([0, -1, 1]))
    with pytest.raises(ValueError, match="lengths"):
        packing.cu_seqlens_from_lengths([2, -1])


@pytest.mark.parametrize(
    ("mask", "form"), [([[1, 1, 0], [1, 0, 0]], "right"), ([[0, 1, 1], [0, 0, 1]], "left"), ([[1, 0, 1], [1, 1, 0]], "any")]
)
def test_form_is_found(mask, form):
    padding = packing.Padding.from_mask(torch.tensor(mask, dtype=torch.bool))
    assert padding.form == form and padding.host_lengths == tuple(map(sum, mask))
    rows = torch.arange(6.0).reshape(2, 3, 1)
    back = packing.unpack(packing.pack(rows, padding.packed), padding.packed, 2, 3)
    assert torch.equal(back, rows * torch.tensor(mask)[..., None])


def test_an_examined_mask_is_examined_again_when_it_changes():
    mask = torch.tensor([[True, True, False]])
    assert packing.Padding.from_mask(mask).form == "right"
    mask[0] = torch.tensor([False, True, True])
    assert packing.Padding.from_mask(mask).form == "left"


bits = lambda size: st.lists(st.booleans(), min_size=size, max_size=size)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 6), st.sampled_from([None, 0, 1, 2]))
def test_packing_fits_only_where_nothing_changes(data, queries, keys, left):
    """What a causal (and windowed) row sees by slots against what it sees once padding is dropped."""
    real_q, real_k = data.draw(bits(queries)), data.draw(bits(keys))
    slot = [keys - queries + i for i in range(queries)]
    q_index, k_index = [i for i in range(queries) if real_q[i]], [j for j in range(keys) if real_k[j]]
    shift = len(k_index) - len(q_index)
    sees = lambda j, p: j <= p and (left is None or j >= p - left)
    same = all(
        [j for j in k_index if sees(j, slot[i])] == [j for n, j in enumerate(k_index) if sees(n, shift + m)] for m, i in enumerate(q_index)
    )
    fits = bool(packing.fits_packing(torch.tensor([real_q]), torch.tensor([real_k]), torch.tensor([slot]), holes_matter=left is not None))
    assert same or not fits, "packing would change what a row sees"
    if left is None:
        assert fits or not same, "causal alone: exactly then"


@pytest.mark.parametrize(("rows", "size"), [(1, 0), (1, 1), (1, 4), (2, 3)])
def test_the_form_of_every_mask(rows, size):
    for bits in itertools.product([False, True], repeat=rows * size):
        mask = torch.tensor(bits, dtype=torch.bool).reshape(rows, size)
        real = mask.sum(1).tolist()
        right = mask.tolist() == [[True] * n + [False] * (size - n) for n in real]
        left = mask.tolist() == [[False] * (size - n) + [True] * n for n in real]
        found = packing.Padding.from_mask(mask)
        assert (found.form, list(found.host_lengths)) == ("right" if right else "left" if left else "any", real)


@pytest.mark.parametrize("lengths", [[3.7, 5], torch.tensor([3.7, 5.0]), [True, 5], 3, [[3], [4]], "35"])
def test_lengths_are_whole_numbers(lengths):
    with pytest.raises(TypeError, match=r"^lengths: whole numbers"):
        packing.Padding.from_lengths(lengths, 5)


@pytest.mark.parametrize("mask", [None, [[True]], torch.ones(2, 5), torch.ones(2, 1, 1, 5, dtype=torch.bool)])
def test_a_padding_is_of_a_bool_mask(mask):
    for make in (packing.Padding.from_mask, lambda mask: packing.Padding(mask, "any")):
        with pytest.raises(TypeError, match=r"^mask: a \(B, S\) bool tensor"):
            make(mask)


def test_a_padding_whose_mask_was_changed_is_refused():
    """What was made of it once (lengths, indices, what fits) would no longer be true."""
    query, mask = torch.randn(2, 5, 2, 8), torch.ones(2, 5, dtype=torch.bool)
    padding = packing.Padding.from_mask(mask)
    for _ in range(2):
        attnreg.attention(query, query, query, key_mask=padding)
    mask[0, 2:] = False
    for argument in ("key_mask", "query_mask"):
        with pytest.raises(ValueError, match="changed in place; make a new one"):
            attnreg.attention(query, query, query, **{argument: padding})
    attnreg.attention(query, query, query, key_mask=packing.Padding.from_mask(mask))
    attnreg.attention(query, query, query, key_mask=mask)


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda given: pickle.loads(pickle.dumps(given))}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_a_padding_is_a_padding_of_its_own(way):
    """As a loader's worker sends it: its mask counts its own changes, and what was found beside other paddings, by their ids, stays behind."""
    mask = torch.ones(2, 5, dtype=torch.bool)
    for row, start in enumerate((2, 4, 3, 4)):
        mask[row % 2, start:] = False
    query, padding = torch.randn(2, 5, 2, 8), packing.Padding.from_mask(mask)
    attnreg.attention(query, query, query, key_mask=padding)
    keys, queries = padding, packing.Padding.from_mask(torch.rand(2, 5) < 0.5)
    packing.found_to_fit(AttentionCall(query, query, query, causal=True, key_mask=keys, query_mask=queries))
    assert padding.fits
    new = COPIES[way](padding)
    assert (new.form, new.host_lengths, new.fits, new.runs) == (padding.form, padding.host_lengths, {}, {})
    output = attnreg.attention(query, query, query, key_mask=new)
    assert torch.equal(output, attnreg.attention(query, query, query, key_mask=mask))
    mask[0, 1] = False
    with pytest.raises(ValueError, match="changed in place; make a new one"):
        COPIES[way](padding)


@pytest.mark.parametrize("made", ["in inference", "before"])
def test_what_a_padding_keeps_serves_beyond_inference_mode(made):
    """A validation's mask may be a training's: tensors made under inference_mode can't be saved for a backward pass."""
    mask = torch.tensor([[True, True, False], [True, True, True]])
    padding = packing.Padding.from_mask(mask) if made == "before" else None
    with torch.inference_mode():
        padding = packing.Padding.from_mask(mask)
        kept = [padding.lengths, *padding.packed[:2], *padding.bounds]
    assert not any(tensor.is_inference() for tensor in kept)
    rows = torch.randn(2, 3, 4, requires_grad=True)
    packing.pack(rows, packing.Padding.from_mask(mask).packed).sum().backward()
    assert torch.equal(rows.grad, mask[:, :, None].expand(2, 3, 4).float())


def test_a_padding_beside_itself_is_freed_at_once():
    mask, call = torch.tensor([[True, False, True]]), torch.randn(1, 3, 2, 8)
    packing.found_to_fit(
        AttentionCall(call, call, call, causal=True, key_mask=packing.Padding.from_mask(mask), query_mask=packing.known(mask))
    )
    gone = weakref.ref(packing.known(mask))
    gc.disable()
    try:
        del mask
        assert gone() is None
    finally:
        gc.enable()


def test_a_mask_that_lives_long_keeps_few_of_those_it_met():
    keys, call = packing.Padding.from_mask(torch.rand(2, 6) < 0.6), torch.randn(2, 6, 2, 8)
    for _ in range(200):
        queries = packing.Padding.from_mask(torch.rand(2, 6) < 0.6)
        packing.found_to_fit(AttentionCall(call, call, call, causal=True, key_mask=keys, query_mask=queries))
    assert 0 < len(keys.fits) <= packing.KEPT


@pytest.mark.parametrize(
    ("form", "lengths", "host", "says"),
    [
        ("right", torch.tensor([2]), None, r"lengths: \(2,\)"),
        ("right", torch.tensor([2.0, 3.0]), None, "lengths: .* integers"),
        ("right", [2, 3], None, "lengths: .* tensor"),
        ("right", torch.tensor([3, 3]), None, r"lengths: .*\[2, 3\], got \[3, 3\]"),
        ("right", None, (2,), "host_lengths"),
        ("right", None, (3, 3), r"host_lengths: .*\[2, 3\], got \[3, 3\]"),
        ("left", None, None, "form: 'right' or 'any' .* got 'left'"),
    ],
)
def test_a_padding_that_contradicts_its_mask_is_refused(form, lengths, host, says):
    mask = torch.tensor([[True, True, False, False], [True, True, True, False]])
    with pytest.raises((TypeError, ValueError), match=says):
        packing.Padding(mask, form, lengths, host)


def test_a_padding_that_fits_its_mask_is_taken():
    mask = torch.tensor([[False, True, True], [True, True, True], [False, False, False]])
    for form in ("left", "any"):
        padding = packing.Padding(mask, form, torch.tensor([2, 3, 0], dtype=torch.int32), (2, 3, 0))
        assert padding.packed.cu_seqlens.tolist() == [0, 2, 5, 5]
    assert packing.Padding(torch.ones(2, 3, dtype=torch.bool), "left").form == "left"
    with FakeTensorMode():
        assert packing.Padding(torch.ones(2, 3, dtype=torch.bool), "right").lengths.shape == (2,)


def test_a_padding_is_made_and_used_inside_of_transforms():
    mask = torch.tensor([[True, True, False], [True, True, True]])

    def total(x):
        padding = packing.Padding(mask, "right", torch.tensor([2, 3]))
        return x * padding.lengths.sum()

    assert torch.func.grad(total)(torch.ones(())) == 5.0
    assert torch.vmap(total)(torch.ones(2)).tolist() == [5.0, 5.0]
    assert torch.vmap(lambda mask: packing.Padding(mask, "right").lengths)(torch.stack([mask, mask])).tolist() == [[2, 3], [2, 3]]
    padding = packing.Padding(mask, "right")
    torch.func.grad(lambda x: x * padding.bounds[1].sum() * padding.packed.cu_seqlens.sum())(torch.ones(()))
    assert padding.bounds[1].tolist() == [2, 3] and padding.packed.cu_seqlens.tolist() == [0, 2, 5]
    with pytest.raises(TypeError, match="host_lengths: whole numbers"):
        packing.Padding(mask, "right", host_lengths=(2.0, 3.5))


@pytest.mark.parametrize("given", [[1.9, 2.9], [True, False], torch.tensor([1.5]), torch.tensor([True])], ids=str)
def test_lengths_of_segments_are_whole_numbers(given):
    with pytest.raises(TypeError, match="lengths: whole numbers"):
        packing.cu_seqlens_from_lengths(given)


@pytest.mark.parametrize("function", [packing.cu_seqlens_from_documents, packing.cu_seqlens_from_positions])
def test_ids_are_whole_numbers_in_one_or_two_dimensions(function):
    with pytest.raises(TypeError, match="_ids: whole numbers"):
        function(torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match=r"_ids: shape \(S,\) or \(B, S\)"):
        function(torch.zeros(1, 2, 3, dtype=torch.long))


def test_lists_of_numbers_do_not_follow_torchs_default_device():
    query = torch.randn(2, 3, 1, 8)
    with torch.device("meta"):
        output = attnreg.attention(query, query, query, key_lengths=[1, 2])
        cu = packing.cu_seqlens_from_lengths([1, 2])
        padding = packing.Padding.from_lengths([1, 2], 3, device="cpu")
    assert output.device == cu.device == padding.mask.device == torch.device("cpu")
