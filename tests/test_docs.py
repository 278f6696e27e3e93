"""The documents name what there is, and what they show is what the code gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import attnreg
from attnreg import conformance, hookspecs, kernels, matrices

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
WRITING = (ROOT / "docs/writing-a-backend.md").read_text()
CODE = re.compile(r"^```.*?^```$|`[^`]+`", re.DOTALL | re.MULTILINE)
"""What stands in fences and between backquotes."""
LIBRARIES = ("flash2", "flash3", "flash4")


def part(text: str, name: str) -> str:
    """What stands between `<!-- name -->` and `<!-- /name -->`."""
    return re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", text, re.DOTALL).group(1).strip()


def named(word: str, text: str) -> bool:
    """Whether the code of a text has a word. Its sentences may have it by chance: "use", "needs" and "backends" are public names."""
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", piece) for piece in CODE.findall(text))


def hooks() -> list[str]:
    return [name for name in dir(hookspecs) if hasattr(getattr(hookspecs, name), "attnreg_spec")]


def test_every_hook_is_documented():
    assert hooks() == ["attnreg_backends"]
    assert [name for name in hooks() if not named(name, WRITING)] == []


def test_every_feature_is_documented():
    assert [feature.name for feature in attnreg.Feature if not named(feature.name, WRITING)] == []


def test_every_public_name_is_documented():
    assert [name for name in attnreg.__all__ if not named(name, WRITING)] == []
    assert [name for name in attnreg.__all__ if not hasattr(attnreg, name)] == []


def test_every_name_of_the_suite_is_documented():
    assert [name for name in conformance.__all__ if not named(name, WRITING)] == []
    assert [name for name in conformance.__all__ if not hasattr(conformance, name)] == []


def test_every_field_of_a_backend_is_documented():
    fields = [f for cls in (attnreg.Backend, attnreg.Capabilities) for f in cls.__dataclass_fields__ if not f.startswith("_")]
    assert [name for name in fields if not named(name, WRITING)] == []


@pytest.mark.parametrize("word", ["attnreg_backends", "CAUSAL", "use", "needs", "backends", "Profile", "run"])
def test_a_missing_name_would_be_noticed(word):
    without = CODE.sub(lambda found: found[0].replace(word, "gone"), WRITING)
    assert named(word, WRITING) and not named(word, without)
    assert word not in ("use", "needs", "backends") or re.search(rf"\b{word}\b", without), "a sentence has it, and is no mention"


@pytest.mark.parametrize(
    "path", sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]), ids=lambda p: p.name
)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


def without_libraries() -> None:
    here = [name for name in LIBRARIES if attnreg.backends()[name].reason_missing is None]
    if here:
        pytest.skip(f"claims as without kernel libraries; {', '.join(here)} is installed here")


def test_the_matrix_of_the_readme_is_that_of_the_claims():
    without_libraries()
    builtin = {backend.name for backend in kernels.attnreg_backends()}
    table = matrices.markdown(*matrices.claims(b for name, b in attnreg.backends().items() if name in builtin))
    assert part(README, "matrix") == table, "write the output of `attnreg matrix --markdown`, without plugins, into README.md"


def test_the_explanation_of_the_readme_is_what_is_said():
    """Lines in a row, in order; "..." stands for those that another machine says otherwise."""
    without_libraries()
    shown = part(README, "explain").removeprefix("```text").removesuffix("```").strip("\n").split("\n")
    query, key = torch.randn(2, 128, 32, 64), torch.randn(2, 128, 8, 64)
    said = "\n" + str(attnreg.explain(query, key, key, causal=True, window=(127, None))) + "\n"
    assert "attnreg.explain(q, k, v, causal=True, window=(127, None))" in README and shown[-1] == "..."
    assert said.startswith("\n" + shown[0] + "\n")
    for piece in "\n".join(shown).split("\n...")[:-1]:
        before, found, said = said.partition(piece + "\n")
        assert found, f"{piece!r} is not what is said after {before!r}"
        said = "\n" + said
