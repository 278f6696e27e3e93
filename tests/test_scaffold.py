"""What `attnreg new-backend` writes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import attnreg
from attnreg.scaffold import OWN, TEMPLATES, write_package


def test_the_backend_runs_as_written(tmp_path):
    written = write_package("my_kernel", tmp_path)
    root = tmp_path / "attnreg-my-kernel"
    assert len(written) == len(TEMPLATES) and all(path.is_file() for path in written)
    spec = importlib.util.spec_from_file_location("attnreg_my_kernel", root / "attnreg_my_kernel" / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    attnreg.register(module.backend)
    try:
        query, key = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8)
        output = attnreg.attention(query, key, key, causal=True, backend="my_kernel")
        torch.testing.assert_close(output, attnreg.attention(query, key, key, causal=True, backend="reference"))
        assert attnreg.explain(query, key, key, window=(1, 1), backend="my_kernel").chosen is None
    finally:
        attnreg.unregister("my_kernel")


def test_no_placeholder_is_left(tmp_path):
    for path in write_package("mine", tmp_path):
        text = path.read_text()
        assert not any(word in text for word in ("NAME", "MODULE", "DISTRIBUTION")), path
    if sys.version_info >= (3, 11):
        import tomllib

        assert tomllib.loads((tmp_path / "attnreg-mine/pyproject.toml").read_text())["project"]["entry-points"]["attnreg"] == {
            "mine": "attnreg_mine"
        }


@pytest.mark.parametrize("name", ["Mine", "1st", "my-kernel", "", "my kernel"])
def test_other_names_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match=r"^name: "):
        write_package(name, tmp_path)


def test_names_of_attnreg_itself_are_refused(tmp_path):
    """attnreg_pytest as a backend's module would take the place of the pytest plugin that every run of pytest loads."""
    with pytest.raises(ValueError, match=r"^name: .* attnreg_pytest .*choose another, as my_pytest$"):
        write_package("pytest", tmp_path)
    assert not list(tmp_path.iterdir()) and write_package("my_pytest", tmp_path)


def test_which_names_are_attnregs():
    root = Path(__file__).parent.parent
    modules = [*root.glob("attnreg_*.py"), *root.glob("plugins/*/attnreg_*.py")]
    assert {path.stem.removeprefix("attnreg_") for path in modules} == OWN
    assert {path.parent.name.removeprefix("attnreg-") for path in root.glob("plugins/*/pyproject.toml")} < OWN


def test_nothing_is_overwritten(tmp_path):
    write_package("mine", tmp_path)
    with pytest.raises(FileExistsError, match="choose another"):
        write_package("mine", tmp_path)
