"""Arrays of NumPy and JAX in, the same kind out, over the same memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import attnreg

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    jax = jnp = None

needs_jax = pytest.mark.skipif(jax is None, reason="jax is not installed")
KINDS = ["numpy", pytest.param("jax", marks=needs_jax)]


def arrays_of(kind, *tensors):
    make = np.asarray if kind == "numpy" else jnp.asarray
    return tuple(make(t.numpy()) for t in tensors)


def tensors(batch=2, queries=3, keys=5, heads=4, key_heads=2, dim=8):
    torch.manual_seed(0)
    return torch.randn(batch, queries, heads, dim), torch.randn(batch, keys, key_heads, dim), torch.randn(batch, keys, key_heads, dim)


def module_of(kind):
    return np.ndarray if kind == "numpy" else jax.Array


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_returns_the_kind_it_was_given(kind, layout):
    given = tensors()
    expected, lse = attnreg.attention(*given, causal=True, return_lse=True)
    if layout == "bhsd":
        given = tuple(t.transpose(1, 2) for t in given)
    output, log_sum = attnreg.attention(*arrays_of(kind, *given), causal=True, return_lse=True, layout=layout)
    assert isinstance(output, module_of(kind)) and isinstance(log_sum, module_of(kind))
    output = np.asarray(output).swapaxes(1, 2) if layout == "bhsd" else np.asarray(output)
    np.testing.assert_allclose(output, expected.numpy(), atol=1e-6)
    np.testing.assert_allclose(np.asarray(log_sum), lse.numpy(), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_options_that_are_arrays(kind):
    query, key, value = tensors()
    options = {
        "key_mask": torch.rand(2, 5) > 0.3,
        "query_mask": torch.rand(2, 3) > 0.3,
        "mask": torch.rand(1, 4, 3, 5) > 0.2,
        "bias": torch.randn(2, 1, 3, 5),
        "key_lengths": torch.tensor([5, 3], dtype=torch.int32),
        "query_lengths": torch.tensor([3, 2], dtype=torch.int32),
        "key_starts": torch.tensor([0, 1], dtype=torch.int32),
        "alibi_slopes": torch.rand(4),
        "sinks": torch.randn(4),
    }
    expected = attnreg.attention(query, key, value, causal=True, **options)
    given = {name: arrays_of(kind, tensor)[0] for name, tensor in options.items()}
    output = attnreg.attention(*arrays_of(kind, query, key, value), causal=True, **given)
    np.testing.assert_allclose(np.asarray(output), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_with_one_array_twice(kind):
    rows = torch.randn(6, 2, 8)
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    expected = attnreg.attention(rows, rows, rows, causal=True, cu_seqlens=(cu, cu))
    (given, starts) = arrays_of(kind, rows, cu)
    output = attnreg.attention(given, given, given, causal=True, cu_seqlens=(starts, starts))
    np.testing.assert_allclose(np.asarray(output), expected.numpy(), atol=1e-6)
    assert attnreg.last_selection().spec.equal_lengths, "the two cu_seqlens are one array, and must stay one tensor"


def test_numpy_is_shared_even_when_read_only(monkeypatch):
    query, key, value = arrays_of("numpy", *tensors())
    for array in (query, key, value):
        array.flags.writeable = False
    seen = {}

    def run(call):
        seen["pointers"] = [t.data_ptr() for t in (call.query, call.key, call.value)]
        return call.query

    attnreg.register(attnreg.Backend("looks", run, attnreg.Capabilities({attnreg.Feature.GROUPED_HEADS: attnreg.NATIVE})))
    try:
        output = attnreg.attention(query, key, value, backend="looks")
    finally:
        attnreg.unregister("looks")
    assert seen["pointers"] == [a.ctypes.data for a in (query, key, value)]
    assert output.ctypes.data == query.ctypes.data


@needs_jax
def test_jax_is_shared():
    query, key, value = arrays_of("jax", *tensors())
    converted, _ = attnreg.arrays.as_tensors({"query": query, "key": key, "value": value})
    assert [converted[n].data_ptr() for n in ("query", "key", "value")] == [a.unsafe_buffer_pointer() for a in (query, key, value)]


def test_a_type_of_arrays_is_looked_into_once():
    asked = []

    class Counted(np.ndarray):
        def __array_namespace__(self, **_):
            asked.append(self)
            return np

    query, key, value = (a.view(Counted) for a in arrays_of("numpy", *tensors()))
    outputs = [attnreg.attention(query, key, value) for _ in range(3)]
    assert len(asked) == 1
    np.testing.assert_array_equal(outputs[0], outputs[2])
    # What is known of a type holds for its other arrays too.
    np.testing.assert_allclose(attnreg.attention(query[:, ::-1], key, value), outputs[0][:, ::-1], atol=1e-6)


def test_strides_that_torch_lacks_are_copied():
    query, key, value = arrays_of("numpy", *tensors())
    output = attnreg.attention(query[:, ::-1], key, value)
    np.testing.assert_allclose(output, attnreg.attention(query, key, value)[:, ::-1], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16(kind):
    types = pytest.importorskip("ml_dtypes")
    given = [t.bfloat16() for t in tensors()]
    expected = attnreg.attention(*given)
    make = np.asarray if kind == "numpy" else jnp.asarray
    output = attnreg.attention(*(make(t.float().numpy().astype(types.bfloat16)) for t in given))
    assert output.dtype == types.bfloat16
    np.testing.assert_array_equal(np.asarray(output).astype(np.float32), expected.float().numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_attend_to(kind):
    query, key, value = arrays_of(kind, *tensors(keys=0))
    output = attnreg.attention(query, key, value)
    assert output.shape == (2, 3, 4, 8) and not np.asarray(output).any()


def test_mixed_kinds_are_refused():
    query, key, value = tensors()
    with pytest.raises(TypeError, match="key: an array of numpy, as the query is, got one of torch"):
        attnreg.attention(query.numpy(), key, value.numpy())
    with pytest.raises(TypeError, match=r"key: a torch\.Tensor"):
        attnreg.attention(query, key.numpy(), value.numpy())
    with pytest.raises(TypeError, match=r"cu_seqlens\[1\]: an array of numpy"):
        attnreg.attention(query[0].numpy(), key[0].numpy(), value[0].numpy(), cu_seqlens=(np.array([0, 3]), torch.tensor([0, 5])))


@needs_jax
def test_mixed_with_jax():
    query, key, value = tensors()
    with pytest.raises(TypeError, match="key_mask: an array of numpy, as the query is, got one of jax"):
        attnreg.attention(query.numpy(), key.numpy(), value.numpy(), key_mask=jnp.ones((2, 5), bool))


@needs_jax
@pytest.mark.parametrize("transform", ["grad", "jit", "vmap"])
def test_jax_users_are_told_where_gradients_are(transform):
    query, key, value = arrays_of("jax", *tensors())
    function = getattr(jax, transform)(lambda q: attnreg.attention(q, key, value).sum())
    with pytest.raises(TypeError, match="Gradients are torch's"):
        function(query[None] if transform == "vmap" else query)
    with pytest.raises(TypeError, match="key: a JAX array of values"):
        jax.grad(lambda k: attnreg.attention(query, k, value).sum())(key)


def test_masked_arrays_and_foreign_byte_order_are_refused():
    query, key, value = arrays_of("numpy", *tensors())
    with pytest.raises(TypeError, match="value: a plain array"):
        attnreg.attention(query, key, np.ma.masked_array(value, value > 0))
    with pytest.raises(TypeError, match="query: DLPack can't share"):
        attnreg.attention(query.astype(">f4"), key, value)


def test_the_call_is_checked_as_ever():
    query, key, value = arrays_of("numpy", *tensors())
    with pytest.raises(ValueError, match="key_mask: shape"):
        attnreg.attention(query, key, value, key_mask=np.ones((2, 4), bool))
    with pytest.raises(TypeError, match=r"query: a torch\.Tensor, got list"):
        attnreg.attention([1.0], key, value)
    with pytest.raises(TypeError, match="value: "):
        attnreg.attention(query, key, None)


def test_a_kind_that_cannot_be_given_back():
    class Readable:
        __dlpack__ = __dlpack_device__ = None

    with pytest.raises(TypeError, match="has no from_dlpack"):
        attnreg.attention(Readable(), Readable(), Readable())


def test_explain_takes_arrays_too():
    query, key, value = arrays_of("numpy", *tensors())
    assert attnreg.explain(query, key, value, key_lengths=np.array([1, 2])).spec.key_lengths


def test_no_framework_is_imported():
    code = (
        "import sys, numpy as np, attnreg; a = np.ones((1, 2, 1, 8), np.float32); attnreg.attention(a, a, a);"
        "print(sorted({'jax', 'cupy', 'tensorflow', 'onnxruntime'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_packed_steps_of_numpy_arrays_with_a_cache():
    rows = np.random.default_rng(0).standard_normal((3, 2, 4)).astype("float32")
    starts = np.array([0, 1, 3])
    out = attnreg.attention(rows, rows, rows, cache=attnreg.DynamicCache()[0], cu_seqlens=(starts, starts), causal=True)
    alone = attnreg.attention(rows, rows, rows, cu_seqlens=(starts, starts), causal=True)
    np.testing.assert_allclose(out, alone, rtol=1e-5, atol=1e-6)
