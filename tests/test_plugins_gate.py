"""The gate: every plugin of this repository, the scaffold's, and five written here, as wheels beside a wheel of attnreg in a fresh environment.

The good ones compete and explain; the bad ones fail alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from amounts import always

from attnreg.scaffold import write_package

ROOT = Path(__file__).parent.parent
GOOD = sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))

WRITTEN = {
    "broken": "import a_library_that_nobody_has\n",
    "misspelt": "import attnreg\n\n@attnreg.hookimpl\ndef attnreg_backend():\n    return []\n",
    "duplicate": (
        "import attnreg\n\n@attnreg.hookimpl\ndef attnreg_backends():\n"
        "    return [attnreg.Backend(name='sdpa', run=lambda call: call.query, capabilities=attnreg.Capabilities(features={}))]\n"
    ),
    "slow": (
        "import time\ntime.sleep(1.2)\nimport attnreg\n\n@attnreg.hookimpl\ndef attnreg_backends():\n"
        "    return [attnreg.Backend(name='slow', run=lambda call: call.query, capabilities=attnreg.Capabilities(features={}), priority=-5)]\n"
    ),
    "winner": (  # of calls that ask for nothing, with a head dim of 6: the others' own tests hardly meet it
        "import attnreg, torch\n\ndef run(call):\n"
        "    return torch.nn.functional.scaled_dot_product_attention(call.query, call.key, call.value, scale=call.scale)\n\n"
        "@attnreg.hookimpl\ndef attnreg_backends():\n    claims = attnreg.Capabilities(features={}, head_dim=attnreg.Dims(only=(6,)))\n"
        "    return [attnreg.Backend(name='winner', run=run, capabilities=claims, priority=1000, layout='bhsd')]\n"
    ),
}

ASK = """
import json, torch, attnreg
from attnreg import registry
query, key = torch.randn(1, 5, 4, 16), torch.randn(1, 5, 2, 16)
selection = attnreg.explain(query, key, key, causal=True)
try:
    attnreg.attention(query, key, key, backend="brokn")
    lookup = ""
except LookupError as error:
    lookup = str(error)

def agrees(query, key, **options):
    output = attnreg.attention(query, key, key, **options)
    ran = attnreg.last_selection().chosen.name
    return ran, torch.allclose(output, attnreg.attention(query, key, key, **{**options, "backend": "reference"}), atol=1e-5)

six = torch.randn(1, 5, 2, 6)
print(json.dumps({
    "file": attnreg.__file__,
    "backends": {name: registry.origin(name) for name in attnreg.backends()},
    "failures": [str(failure) for failure in registry.failures()],
    "seconds": dict(registry.import_seconds()),
    "chosen": selection.chosen.name,
    "able": selection.able,
    "explained": sorted([*selection.rejected, *selection.able, selection.chosen.name]),
    "selection": str(selection),
    "lookup": lookup,
    "named": [agrees(query, key, causal=True, backend=name) for name in ("scaffolded", "chunked")],
    "automatic": [agrees(six, six), agrees(six, six, causal=True)],
}))
"""


def write(folder: Path, name: str, source: str) -> Path:
    package = folder / f"attnreg-{name}"
    package.mkdir()
    (package / f"attnreg_{name}.py").write_text(source)
    (package / "pyproject.toml").write_text(
        f'[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n[project]\nname = "attnreg-{name}"\nversion = "1.0"\n'
        f'[project.entry-points.attnreg]\n{name} = "attnreg_{name}"\n[tool.setuptools]\npy-modules = ["attnreg_{name}"]\n'
    )
    return package


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A fresh environment with all wheels; what they depend on is seen from this one."""
    pytest.importorskip("setuptools", reason="building wheels needs setuptools")
    folder = tmp_path_factory.mktemp("gate")
    write_package("scaffolded", folder)
    sources = [ROOT, *GOOD, folder / "attnreg-scaffolded", *(write(folder, *package) for package in WRITTEN.items())]
    offline = ["--no-deps", "--no-index", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", *offline, "-w", folder / "wheels", *map(str, sources)], check=True
    )
    wheels = sorted((folder / "wheels").glob("*.whl"))
    assert len(wheels) == len(sources)
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    site = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, "--target", site, *map(str, wheels)], check=True)
    # Behind the environment's own folder, so that its attnreg comes first; .pth files there are not read, so no editable one comes in.
    return python, {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), sysconfig.get_path("purelib"), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def run(environment, *arguments, **variables):
    python, inherited = environment
    return subprocess.run(
        [python, *arguments], env={**inherited, **variables}, cwd=python.parent, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def answer(environment):
    done = run(environment, "-c", ASK)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_is_the_wheel_that_is_asked(answer, environment):
    site = environment[1]["PYTHONPATH"].split(os.pathsep)[0]
    assert Path(answer["file"]).resolve() == Path(site, "attnreg", "__init__.py").resolve() and ROOT not in Path(site).parents


def test_good_plugins_are_brought_and_explained(answer):
    brought = {origin.split()[0] for origin in answer["backends"].values()}
    assert {"attnreg", "attnreg-scaffolded", "attnreg-slow", "attnreg-winner", *(path.name for path in GOOD)} <= brought
    assert answer["explained"] == sorted(answer["backends"])


def test_good_plugins_compete(answer):
    """Those that need no library. Below 0, a plugin is able and not chosen; above the built-in ones, it is chosen for what it claims."""
    assert answer["chosen"] == "sdpa" and {"chunked", "scaffolded"} <= set(answer["able"])
    assert answer["named"] == [["scaffolded", True], ["chunked", True]]
    assert answer["automatic"] == [["winner", True], ["sdpa", True]]


@pytest.mark.parametrize(
    ("name", "says"),
    [("broken", "a_library_that_nobody_has"), ("misspelt", "did you mean 'attnreg_backends'"), ("duplicate", "taken by attnreg")],
)
def test_bad_plugins_fail_alone_and_are_named(answer, name, says):
    (failure,) = [text for text in answer["failures"] if text.startswith(f"attnreg-{name} ")]
    assert says in failure
    assert failure in answer["selection"] and failure in answer["lookup"]
    assert len(answer["failures"]) == 3


def test_a_slow_import_is_timed(answer):
    assert max(answer["seconds"], key=answer["seconds"].get) == "attnreg-slow 1.0" and answer["seconds"]["attnreg-slow 1.0"] > 1


def test_strict_mode_raises(environment):
    done = run(environment, "-c", "import attnreg; attnreg.backends()", ATTNREG_STRICT_PLUGINS="1")
    assert done.returncode != 0 and "PluginError: attnreg-broken 1.0" in done.stderr


def test_doctor_names_the_bad_and_exits_with_one(environment):
    done = run(environment, "-m", "attnreg", "doctor", COLUMNS="200")
    assert done.returncode == 1, done.stderr
    assert all(f"attnreg-{name}" in done.stdout for name in ("broken", "misspelt", "duplicate"))


@pytest.mark.parametrize("path", always([Path("scaffolded")], [Path("scaffolded"), *GOOD]), ids=lambda path: path.name)
def test_each_package_passes_the_suite(environment, path, tmp_path):
    """The scaffold's at once; this repository's plugins by their own tests, which plugins/run runs too, outside the gate."""
    tests = path / "tests"
    if path.name == "scaffolded":
        tests = write_package("scaffolded", tmp_path)[0].parent / "tests"
    done = run(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
