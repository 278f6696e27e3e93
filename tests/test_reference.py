"""The reference against a scalar loop that shares no code with it, over every option, and against tables worked by hand."""

import math

import hypothesis
import oracle
import pytest
import torch

import attnreg
from attnreg.conformance.strategies import cases
from attnreg.conformance.tensors import arrange, canonical, values
from attnreg.kernels.reference import reference
from attnreg.spec import Feature

FEATURES = [
    f
    for f in Feature
    if f
    in (
        Feature.CAUSAL, Feature.UNEQUAL_LENGTHS, Feature.WINDOW, Feature.QUERY_MASK, Feature.KEY_MASK, Feature.MASK, Feature.BIAS,
        Feature.KEY_LENGTHS, Feature.QUERY_LENGTHS, Feature.KEY_STARTS, Feature.PACKED, Feature.ALIBI, Feature.SOFTCAP, Feature.SINKS,
        Feature.SCALE, Feature.LSE, Feature.GROUPED_HEADS, Feature.VALUE_DIM,
    )
]  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_equals_the_scalar_loop(feature):
    drawn = cases(reference.claims, dtypes=(torch.float64,), require={feature}, without={Feature.BACKWARD, Feature.DROPOUT})

    @hypothesis.settings(max_examples=12, derandomize=True, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(drawn)
    def compare(case):
        case = case.replace(
            query_length=min(case.query_length, 6), key_length=min(case.key_length, 8), lse=True, head_dim=min(case.head_dim, 5)
        )
        if case.same_segments:
            case = case.replace(key_length=case.query_length)
        if case.query_mask == "keys" and case.query_length != case.key_length:
            case = case.replace(query_mask="any")
        given = values(case)
        arguments, _ = arrange(case, given)
        output, lse = attnreg.attention(**arguments, backend="reference")
        options = {name: getattr(option, "mask", option) for name, option in given.options.items() if name != "max_seqlens"}
        right, right_lse = oracle.attend(
            **given.tensors, **options, causal=case.causal, window=case.window, softcap=case.softcap, scale=case.scale
        )
        torch.testing.assert_close(canonical(case, output), right, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(lse, right_lse, rtol=1e-10, atol=1e-12)

    compare()


def numbers(rows):
    return torch.tensor(rows, dtype=torch.float64)[None, :, None, :]


def test_two_keys_by_hand():
    """Scores 0 and log 3: weights 1/4 and 3/4."""
    output, lse = attnreg.attention(
        numbers([[1.0]]), numbers([[0.0], [math.log(3)]]), numbers([[8.0], [4.0]]), return_lse=True, backend="reference"
    )
    assert output.item() == pytest.approx(0.25 * 8 + 0.75 * 4)
    assert lse.item() == pytest.approx(math.log(4))


@pytest.mark.parametrize(
    "options, expected",
    [
        # Values 1, 2, 4, 8 and equal scores: each row is the mean of what it sees.
        ({"causal": True}, [1, 1.5, 7 / 3, 3.75]),
        ({"window": (1, 0)}, [1, 1.5, 3, 6]),
        ({"window": (0, 1)}, [1.5, 3, 6, 8]),
        ({"window": (None, 0)}, [1, 1.5, 7 / 3, 3.75]),
        ({"key_mask": torch.tensor([[False, True, True, False]])}, [3, 3, 3, 3]),
        ({"key_mask": torch.tensor([[False, True, True, False]]), "causal": True}, [0, 2, 3, 3]),
        ({"query_mask": torch.tensor([[True, False, True, False]])}, [3.75, 0, 3.75, 0]),
        # Two keys fewer than queries: the last query sits on the last key, the first two see nothing.
        ({"key_lengths": [2], "causal": True}, [0, 0, 1, 1.5]),
        ({"key_lengths": [2], "query_lengths": [2], "causal": True}, [1, 1.5, 0, 0]),
        ({"key_starts": [2], "causal": True}, [0, 0, 4, 6]),
        ({"cu_seqlens": (torch.tensor([0, 1, 3]), torch.tensor([0, 1, 3]))}, [1, 3, 3, 0]),
        ({"cu_seqlens": (torch.tensor([0, 0, 2]), torch.tensor([0, 2, 4])), "causal": True}, [4, 6, 0, 0]),
        # A sink of score 0 beside four keys of score 0: four fifths of the mean.
        ({"sinks": torch.zeros(1, dtype=torch.float64)}, [3, 3, 3, 3]),
        ({"bias": torch.tensor([0.0, -math.inf, -math.inf, 0.0])[None, None, None]}, [4.5, 4.5, 4.5, 4.5]),
        # Slope log 2: a slot's weight halves with each step from the query.
        ({"alibi_slopes": torch.tensor([math.log(2)]), "causal": True}, [1, 5 / 3, 21 / 7, 85 / 15]),
    ],
)  # fmt: skip
def test_tables_by_hand(options, expected):
    zeros = numbers([[0.0]] * 4)
    output = attnreg.attention(zeros, zeros, numbers([[1.0], [2.0], [4.0], [8.0]]), backend="reference", **options)
    assert output.flatten().tolist() == pytest.approx(expected)


def test_softcap_enters_after_the_scale_and_before_the_bias():
    query, key, value = numbers([[2.0]]), numbers([[1.0], [0.0]]), numbers([[1.0], [0.0]])
    bias = torch.tensor([0.5, 0.0])[None, None, None]
    output = attnreg.attention(query, key, value, scale=3.0, softcap=2.0, bias=bias, backend="reference")
    score = 2 * math.tanh(6 / 2) + 0.5
    assert output.item() == pytest.approx(math.exp(score) / (math.exp(score) + 1))


def test_gradients_of_the_reference_are_those_of_its_formula():
    """Against finite differences, every differentiable input at once."""
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(0)
    inputs = (make(2, 3, 4, 2), make(2, 5, 2, 2), make(2, 5, 2, 3), make(1, 4, 3, 5), make(4), make(2, 4))

    def call(query, key, value, bias, sinks, slopes):
        options = {"bias": bias, "sinks": sinks, "alibi_slopes": slopes, "causal": True, "softcap": 3.0, "return_lse": True}
        return attnreg.attention(query, key, value, key_lengths=[5, 3], backend="reference", **options)

    assert torch.autograd.gradcheck(lambda *tensors: torch.nan_to_num(call(*tensors)[0]), inputs)
