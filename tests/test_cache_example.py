"""examples/gpt.py, at a smaller size."""

import importlib.util
import pathlib

import pytest

PATH = pathlib.Path(__file__).parent.parent / "examples" / "gpt.py"


@pytest.mark.parametrize("positions", ["learned", "rotary", "alibi"])
def test_cached_generation_equals_uncached_and_each_prompt_alone(positions):
    spec = importlib.util.spec_from_file_location("gpt", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert all(len(text) == 12 for text in module.main(["--positions", positions, "--seconds", "2", "--new", "12"]))
