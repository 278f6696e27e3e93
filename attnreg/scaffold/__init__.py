"""A new backend's package, ready to install and to test: what `attnreg new-backend` writes."""

from __future__ import annotations

import keyword
import re
from importlib.resources import files
from pathlib import Path

from .. import registry

# Where each template goes. NAME is the backend's name, MODULE the import package.
TEMPLATES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "backend.py": "MODULE/__init__.py",
    "test_conformance.py": "tests/test_conformance.py",
    "ci.yml": ".github/workflows/test.yml",
}

OWN = {"pytest", "chunked", "flashinfer", "jax", "onnxruntime", "sage"}
"""NAMEs whose MODULE and distribution are attnreg's: its pytest plugin, and the plugins of its repository."""


def write_package(name: str, folder: Path) -> list[Path]:
    """Writes `attnreg-NAME` below `folder`; returns the files. Nothing that is there is overwritten.

    name: the backend's name, as users will write it in `backend="..."`: lower-case letters, digits and "_".
    Raises ValueError for another name and for one that is taken or attnreg's, FileExistsError when the package's folder is there.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"name: a lower-case letter, then letters, digits and '_', got {name!r}")
    if keyword.iskeyword(name) or name in {"auto", *registry.backends(), *(b.family for b in registry.backends().values())}:
        raise ValueError(f"name: one that is free, but {name!r} is a word of Python, a backend or a family of backends; choose another")
    if name in OWN:
        raise ValueError(
            f"name: one whose package is not attnreg's own, as attnreg-{name} with its module attnreg_{name} is; choose another, as my_{name}"
        )
    root = folder / f"attnreg-{name.replace('_', '-')}"
    if root.exists():
        raise FileExistsError(f"{root} is there already; choose another name or folder")
    written = []
    for template, place in TEMPLATES.items():
        text = (files(__package__) / "template" / template).read_text(encoding="utf-8")
        path = root / place.replace("MODULE", f"attnreg_{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            text.replace("DISTRIBUTION", root.name).replace("MODULE", f"attnreg_{name}").replace("NAME", name), encoding="utf-8"
        )
        written.append(path)
    return written
