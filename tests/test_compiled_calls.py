"""attention inside torch.compile(fullgraph=True): traced whole, and the same numbers."""

from __future__ import annotations

import pytest
import torch

import attnreg


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_traced_without_a_graph_break(layout):
    def layer(query, key, mask):
        plain = attnreg.attention(query, key, key, causal=True, layout=layout)
        output, lse = attnreg.attention(query, key, key, key_mask=mask, layout=layout, return_lse=True)
        return plain, output, lse

    query, key = torch.randn(2, 6, 6, 8), torch.randn(2, 6, 3, 8)
    key = key if layout == "bshd" else key.transpose(1, 2)
    arguments = (query, key, torch.rand(2, 6) < 0.7)
    for mine, right in zip(torch.compile(layer, fullgraph=True, backend="eager")(*arguments), layer(*arguments)):
        torch.testing.assert_close(mine, right)


def test_a_size_of_zero_and_a_changed_policy():
    compiled = torch.compile(lambda q, k: attnreg.attention(q, k, k), fullgraph=True, backend="eager")
    query = torch.randn(1, 3, 2, 8)
    assert not compiled(query, query[:, :0]).any()
    torch.testing.assert_close(compiled(query, query), attnreg.attention(query, query, query))
    with attnreg.using("reference"):
        exact = attnreg.attention(query.double(), query.double(), query.double())
        assert torch.equal(compiled(query, query), exact.float())


def test_no_backend_says_why():
    with pytest.raises(Exception, match="dropout: not claimed"):
        torch.compile(lambda q: attnreg.attention(q, q, q, dropout_p=0.5, backend="flex"), fullgraph=True, backend="eager")(
            torch.randn(1, 3, 2, 8)
        )


def test_head_counts_and_dims_may_be_symbolic():
    compiled = torch.compile(lambda q, k: attnreg.attention(q, k, k, causal=True), fullgraph=True, backend="eager", dynamic=True)
    for heads, dim in ((2, 8), (4, 16), (6, 24)):
        query, key = torch.randn(2, 6, heads, dim), torch.randn(2, 6, 2, dim)
        torch.testing.assert_close(compiled(query, key), attnreg.attention(query, key, key, causal=True))


@pytest.mark.parametrize("masks", ["keys", "both"])
def test_padding_that_fits_under_changing_sizes(masks):
    padding = [attnreg.Padding.from_lengths([2, 5, 1], 5) for _ in range(2)]
    options = {"key_mask": padding[0], "query_mask": padding[1] if masks == "both" else None, "causal": True}
    compiled = torch.compile(lambda q, k: attnreg.attention(q, k, k, **options), fullgraph=True, backend="eager", dynamic=True)
    for queries in (5,) if masks == "both" else (4, 3, 1):
        query, key = torch.randn(3, queries, 2, 8), torch.randn(3, 5, 2, 8)
        torch.testing.assert_close(compiled(query, key), attnreg.attention(query, key, key, **options))
