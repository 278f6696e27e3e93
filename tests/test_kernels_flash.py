"""What flash2, flash3 and flash4 claim by version, build and card, and what they say of an environment that is not in order."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
from pathlib import Path
from types import SimpleNamespace

import fresh
import pytest
import torch
from torch._subclasses import FakeTensorMode

import attnreg
from attnreg.call import AttentionCall
from attnreg.kernels import flash2, flash3, flash4
from attnreg.kernels.installed import Library
from attnreg.packing import Padding
from attnreg.spec import AttentionSpec, Feature

SINCE = {
    "2.1.0": {Feature.UNEQUAL_LENGTHS},
    "2.3": {Feature.WINDOW},
    "2.4.1": {Feature.DETERMINISTIC},
    "2.6.1": {Feature.ALIBI, Feature.PAGED, Feature.SOFTCAP, Feature.LSE, Feature.SINKS},
    "2.6.2": set(),
    "2.10": {Feature.COMPILE},
    "10.0": set(),
}


def spec(queries=8, keys=8, heads=4, key_heads=2, dim=64, gradients=False, capability=(9, 0), **options):
    shapes = ((2, queries, heads, dim), (2, keys, key_heads, dim), (2, keys, key_heads, dim))
    if "cu_seqlens" in options:
        shapes = tuple((1, *shape[1:]) for shape in shapes)
    tensors = [torch.zeros(s, dtype=torch.bfloat16, requires_grad=gradients) for s in shapes]
    return AttentionCall(*tensors, **options).spec._replace(device="cuda", capability=capability)


def words(claims, asked):
    return {reason.what for reason in claims.reasons_against(asked)}


def test_each_version_has_what_came_with_it_and_before():
    known = set(flash2.claims("2.0.9").features)
    gated = set().union(*SINCE.values())
    assert not known & gated
    for version, gained in SINCE.items():
        known |= gained
        assert set(flash2.claims(version).features) == known, version


def test_below_2_1_unequal_causal_lengths_are_refused():
    unequal = spec(3, 8, causal=True)
    assert words(flash2.claims("2.0.9"), unequal) == {"unequal_lengths"}
    assert not words(flash2.claims("2.1.0"), unequal) and not words(flash2.claims("2.0.9"), spec(3, 8))


def test_softcap_is_trained_from_2_6_2_and_never_with_dropout():
    assert not words(flash2.claims("2.6.1"), spec(softcap=5.0))
    assert words(flash2.claims("2.6.1"), spec(softcap=5.0, gradients=True)) == {"softcap"}
    assert not words(flash2.claims("2.6.2"), spec(softcap=5.0, gradients=True))
    assert words(flash2.claims("2.10"), spec(softcap=5.0, dropout_p=0.1)) == {"softcap"}


def test_an_lse_with_dropout_would_keep_all_weights():
    claims = flash2.claims("2.8.3")
    assert words(claims, spec(dropout_p=0.1, return_lse=True)) == {"lse"}
    assert words(claims, spec(dropout_p=0.1, sinks=torch.zeros(4))) == {"lse"}
    assert not words(claims, spec(dropout_p=0.1)) and not words(claims, spec(return_lse=True))


def test_right_windows_only_where_no_query_sits_before_the_first_key():
    claims = flash2.claims("2.8.3")
    assert words(claims, spec(20, 3, window=(None, 5))) == {"window"}
    assert not words(claims, spec(3, 20, window=(None, 5))) and not words(claims, spec(8, 8, window=(2, 5)))
    assert not words(claims, spec(20, 3, window=(2, None), causal=True))


def test_only_flash2_drops():
    asked = spec(dropout_p=0.1, gradients=True)
    assert not words(flash2.claims("2.8.3"), asked)
    assert words(flash3.claims({}), asked) == words(flash4.claims("4.0.0b36"), asked) == {"dropout"}


def test_the_way_of_padding():
    left, right = Padding.from_lengths([3, 8], 8, side="left"), Padding.from_lengths([3, 8], 8)
    ways = {}
    for name, options in {
        "left": {"key_mask": left, "query_mask": left, "causal": True},
        "left, training": {"key_mask": left, "query_mask": left, "causal": True, "gradients": True},
        "right": {"key_mask": right, "query_mask": right, "causal": True},
        "right, all seen": {"key_mask": right},
        "lengths": {"key_lengths": [3, 8], "causal": True},
        "starts": {"key_starts": [3, 0], "causal": True},
        "queries only": {"query_mask": right, "causal": True},
    }.items():
        from attnreg.kernels.flash import way_for

        asked = spec(**options)
        ways[name] = tuple(way_for(asked, k) for k in (flash2.kernels("2.8.3"), flash2.kernels("2.5.0"), flash4.kernels("4.0.0b36")))
        assert not words(flash2.claims("2.8.3"), asked), name
        assert not words(flash4.claims("4.0.0b36"), asked), name
    assert ways == {
        "left": ("cached", "runs", "gathered"),
        "left, training": ("runs", "runs", "gathered"),
        "right": ("runs", "runs", "gathered"),
        "right, all seen": ("cached", "cached", "cached"),
        "lengths": ("cached", "cached", "cached"),
        "starts": ("cached", "runs", "gathered"),
        "queries only": ("dense", "dense", "dense"),
    }


def test_a_refused_padding_says_which_case_it_is():
    right = Padding.from_lengths([3, 8], 8)
    (reason,) = flash2.claims("2.8.3").reasons_against(spec(key_mask=right, causal=True))
    assert "keys right, queries unmasked" in reason.asked and "Padding" in reason.remedy
    (reason,) = flash2.claims("2.8.3").reasons_against(spec(key_mask=right.mask, causal=True))
    assert "not known to keep" in reason.asked and "from_lengths" in reason.remedy


def test_compiled_and_captured_calls_never_wait_for_the_device():
    left = Padding.from_lengths([3, 8], 8, side="left")
    padded = spec(key_mask=left, causal=True)
    claims = flash2.claims("2.8.3")
    assert not words(claims, padded._replace(capturing=True))
    assert not words(claims, padded._replace(compiling=True))
    assert words(claims, padded._replace(compiling=True, single_query=True)) == {"compile"}
    assert not words(claims, spec(causal=True)._replace(compiling=True))
    trained = spec(key_mask=left, causal=True, gradients=True)._replace(capturing=True)
    assert not words(claims, trained)
    # Before 2.3.4 padding has to be dropped, and what holes there are between real tokens always.
    assert words(flash2.claims("2.3.3"), trained) == {"capture"}
    assert words(claims, trained._replace(key_mask="any", padding_fits_packing=True)) == {"capture"}


def test_switches_of_a_flash3_build():
    everything = flash3.claims({})
    assert {Feature.WINDOW, Feature.SOFTCAP, Feature.PAGED, Feature.BACKWARD, Feature.PACKED} <= set(everything.features)
    off = dict.fromkeys([f"FLASHATTENTION_DISABLE_{n}" for n in ("BACKWARD", "PAGEDKV", "LOCAL", "FP16", "HDIM256")], True)
    less = flash3.claims(off)
    assert not {Feature.WINDOW, Feature.PAGED, Feature.BACKWARD} & set(less.features) and Feature.SOFTCAP in less.features
    assert less.dtypes == (torch.bfloat16,) and less.head_dim.largest == 192
    assert words(everything, spec(capability=(8, 0))) == {"capability"}
    assert words(everything, spec(dim=256, gradients=True, deterministic=True)) == {"deterministic"}
    assert Feature.COMPILE in everything.features and Feature.COMPILE not in flash3.claims(None).features
    unlengthed = flash3.claims({"FLASHATTENTION_DISABLE_VARLEN": True})
    assert not {Feature.PACKED, Feature.KEY_LENGTHS, Feature.PAGED} & set(unlengthed.features), "pages are read by their lengths"


def built(*sizes, wide=True, narrow=True) -> dict[str, bool]:
    """The switches of a flash-attn 3 with kernels for these head dims, as its setup.py names them."""
    off = {f"FLASHATTENTION_DISABLE_HDIM{size}": size not in sizes for size in (64, 96, 128, 192, 256)}
    return off | {"FLASH_ATTENTION_DISABLE_HDIMDIFF64": not wide, "FLASH_ATTENTION_DISABLE_HDIMDIFF192": not narrow}


SWITCHES = {
    *(f"FLASHATTENTION_DISABLE_{name}" for name in ("BACKWARD", "SPLIT", "PAGEDKV", "APPENDKV", "LOCAL", "SOFTCAP", "PACKGQA")),
    *(f"FLASHATTENTION_DISABLE_{name}" for name in ("FP16", "FP8", "VARLEN", "CLUSTER", "SM8x")),
    *(f"FLASHATTENTION_DISABLE_HDIM{size}" for size in (64, 96, 128, 192, 256)),
    *("FLASHATTENTION_ENABLE_VCOLMAJOR", "FLASH_ATTENTION_DISABLE_HDIMDIFF64", "FLASH_ATTENTION_DISABLE_HDIMDIFF192"),
}
"""As flash-attention/hopper/setup.py writes them down, the last two with one underscore more."""


class Asked(dict):
    """Switches that remember which were asked for."""

    def get(self, name, default=None):
        self.setdefault("names", set()).add(name)
        return super().get(name, default)


def test_every_switch_that_flash3_reads_is_one_of_a_build():
    flags = Asked({"FLASHATTENTION_DISABLE_FP8": True})
    flash3.claims(flags)
    for dims in ((64, 128), (192, 128)):
        flash3.takes_dims(*dims, False, flags)
    asked = flags["names"]
    assert asked <= SWITCHES and {"FLASH_ATTENTION_DISABLE_HDIMDIFF64", "FLASH_ATTENTION_DISABLE_HDIMDIFF192"} <= asked


@pytest.mark.parametrize("distribution", ["flash-attn-3", "fa3-fwd"])
def test_true_switches_of_flash3(distribution):
    path = files_of(distribution, "flash_attn_config.py" if distribution == "flash-attn-3" else "fa3_fwd_config.py")
    written = next(n.value for n in ast.parse(path.read_text()).body if isinstance(n, ast.Assign) and n.targets[0].id == "CONFIG")
    assert set(ast.literal_eval(written)["build_flags"]) == SWITCHES


@pytest.mark.parametrize(
    ("flags", "head_dim", "value_dim", "native"),
    [
        (built(64, 96, 128, 192, 256), 64, 512, True),
        (built(64, 96, 128, 192, 256), 192, 128, True),
        (built(64, 96, 128, 192, 256), 192, 96, False),
        (built(64, 96, 128, 192, 256), 96, 64, False),
        (built(64, 128, wide=False), 64, 128, False),
        (built(64, 128, wide=False), 64, 32, True),
        (built(64, 128, wide=False), 32, 64, True),
        (built(96, 128), 64, 256, False),
        (built(96, 128), 64, 32, False),
        (built(64, 128, 256), 192, 128, False),
        (built(64, 192), 128, 112, False),
    ],
)
def test_head_dims_that_a_flash3_build_takes_as_they_are(flags, head_dim, value_dim, native):
    """The wide and the narrow kernels are reached through those of 64 and 192: without these, others would be run on the wrong dims."""
    assert flash3.takes_dims(head_dim, value_dim, False, flags) == native
    assert flash3.takes_dims(head_dim, head_dim, True, flags)
    assert not flash3.takes_dims(head_dim, value_dim, True, flags)


def test_a_flash3_build_pads_to_no_head_dim_that_it_lacks():
    small = flash3.claims(built(64, 128, wide=False))
    assert not words(small, spec(dim=96)) and not words(small, spec(dim=128)) and words(small, spec(dim=136)) == {"head_dim"}
    other = spec(dim=64)._replace(value_dim=128)
    assert not words(small, other) and words(small, other._replace(value_dim=136)) == {"value_dim"}
    assert not words(flash3.claims(built(64)), other), "the kernel for wide values"
    assert words(flash3.claims(built(64)), other._replace(gradients=("query",))) == {"value_dim"}


def test_deterministic_gradients_of_flash3_by_the_kernel_that_is_run():
    asked = spec(dim=96, gradients=True, deterministic=True)
    assert not words(flash3.claims(built(64, 128)), asked)
    (reason,) = flash3.claims(built(64, 256)).reasons_against(asked)
    assert reason.what == "deterministic" and "64 or less" in reason.supported
    wide = spec(dim=64, gradients=True, deterministic=True)._replace(value_dim=256)
    assert words(flash3.claims({}), wide) == {"deterministic"}


def test_an_lse_that_a_flash3_build_cant_be_asked_for():
    older, asked = flash3.claims(None, asks_lse=False), spec(gradients=True, return_lse=True)
    assert words(older, asked) == {"lse"} and not words(flash3.claims(None), asked)
    assert not words(older, spec(return_lse=True)) and not words(older, spec(gradients=True))


def test_cards_of_flash4():
    claims = flash4.claims("4.0.0b36")
    assert not words(claims, spec(gradients=True))
    assert words(claims, spec(gradients=True, capability=(8, 0))) == {"backward"}
    assert words(claims, spec(dim=192, capability=(10, 0))) == {"head_dim"} and not words(claims, spec(dim=256, capability=(9, 0)))


def test_one_query_prefers_split_keys():
    lone, prefill = spec(1, 8, causal=True)._replace(sizes=(2, 1, 4096)), spec(causal=True)
    assert flash4.flash4.rank(lone) < flash2.flash2.rank(lone)
    assert flash4.flash4.rank(prefill) > flash2.flash2.rank(prefill)
    assert flash3.flash3.rank(prefill._replace(compiling=True, sizes=None)) > flash2.flash2.rank(
        prefill._replace(compiling=True, sizes=None)
    )
    compiled = lone._replace(compiling=True, sizes=None)
    assert flash3.flash3.rank(compiled) < flash2.flash2.rank(compiled)


# ---------------------------------------------------------------------- environments, each in a process of its own

NAMES = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
FUNCTIONS = "".join(f"def {name}(*a, **k): ...\n" for name in NAMES)
BROKEN = "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEa')\n"
CUTE = "\n".join(f"def {name}(q, k, v, {', '.join(f'{a}=None' for a in arguments)}): ..." for name, arguments in flash4.NEEDED.items())
TWO = {"flash_attn/__init__.py": "from .flash_attn_interface import flash_attn_func\n", "flash_attn/flash_attn_interface.py": FUNCTIONS}
BROKEN_TWO = {**TWO, "flash_attn/flash_attn_interface.py": BROKEN}
FOUR = {"flash_attn/cute/__init__.py": CUTE}


def environment(folder: Path, *distributions: tuple[str, str, dict], before: str = "") -> dict[str, str | None]:
    """What each backend says is missing, where these (name, version, files) are installed; later ones overwrite. before: code that runs first."""
    for name, version, files in distributions:
        record = []
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
            record.append(f"{path},,")
        described = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        described.mkdir(parents=True)
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (described / "RECORD").write_text("\n".join(record))
    script = (
        f"{before}\n"
        "import json, attnreg; b = attnreg.backends();"
        "print(json.dumps({n: str(b[n].reason_missing) if b[n].reason_missing else None for n in ('flash2', 'flash3', 'flash4')}));"
        "import torch; q = torch.ones(1, 2, 1, 8); attnreg.attention(q, q, q); attnreg.explain(q, q, q, backend='flash')"
    )
    return json.loads(fresh.run(folder, script, folder, Path(attnreg.__file__).parents[1]))


needs_nothing_installed = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is not None, reason="a flash-attn is installed here, beside which none can be faked"
)


@needs_nothing_installed
def test_nothing_installed(tmp_path):
    said = environment(tmp_path)
    assert all("not installed" in text and ("pip install" in text) for text in said.values())


@needs_nothing_installed
def test_flash_attn_4_alone(tmp_path):
    said = environment(tmp_path, ("flash-attn-4", "4.0.0b36", FOUR))
    assert said["flash4"] is None
    assert "the folder flash_attn belongs to flash-attn-4" in said["flash2"] and "pip install flash-attn" in said["flash2"]


@needs_nothing_installed
def test_flash_attn_2_alone(tmp_path):
    said = environment(
        tmp_path, ("flash-attn", "2.8.3.post2", {**TWO, "flash_attn/cute/__init__.py": "def flash_attn_func(q, k, v): ...\n"})
    )
    assert said["flash2"] is None and "belongs to flash-attn" in said["flash4"]


@needs_nothing_installed
def test_both(tmp_path):
    said = environment(tmp_path, ("flash-attn", "2.8.3", TWO), ("flash-attn-4", "4.0.0b36", FOUR))
    assert said["flash2"] is None and said["flash4"] is None


@needs_nothing_installed
def test_libraries_of_the_same_name_for_rocm(tmp_path):
    """flash-attn's port for it takes windows and soft caps, and leaves them out."""
    both = ("flash-attn", "2.8.3", TWO), ("flash-attn-4", "4.0.0b36", FOUR)
    said = environment(tmp_path, *both, before="import torch; torch.version.hip = '6.4'")
    for name in ("flash2", "flash4"):
        assert "for CUDA" in said[name] and "for ROCm" in said[name] and "sdpa" in said[name]


@needs_nothing_installed
def test_a_broken_2_does_not_hide_4(tmp_path):
    said = environment(tmp_path, ("flash-attn", "2.8.3", BROKEN_TWO), ("flash-attn-4", "4.0.0b36", FOUR))
    assert said["flash4"] is None
    assert "undefined symbol" in said["flash2"] and "reinstall" in said["flash2"]


@needs_nothing_installed
def test_a_broken_4_does_not_hide_2(tmp_path):
    said = environment(
        tmp_path, ("flash-attn", "2.8.3", TWO), ("flash-attn-4", "4.0.0b36", {"flash_attn/cute/__init__.py": "import cutlass_dsl_absent\n"})
    )
    assert said["flash2"] is None and "cutlass_dsl_absent" in said["flash4"] and "reinstall" in said["flash4"]


@needs_nothing_installed
def test_files_of_2_over_those_of_4(tmp_path):
    old = {"flash_attn/cute/__init__.py": "def flash_attn_func(q, k, v, softmax_scale=None, causal=False): ...\n"}
    said = environment(tmp_path, ("flash-attn-4", "4.0.0b36", FOUR), ("flash-attn", "2.8.3", {**TWO, **old}))
    assert said["flash2"] is None and "return_lse" in said["flash4"] and "copy that flash-attn 2 brings" in said["flash4"]


@needs_nothing_installed
def test_half_of_2(tmp_path):
    said = environment(tmp_path, ("flash-attn-4", "4.0.0b36", FOUR), ("flash-attn", "2.8.3", {}))
    assert said["flash4"] is None and "flash_attn_interface" in said["flash2"] and "reinstall" in said["flash2"]


@needs_nothing_installed
@pytest.mark.parametrize("lacking", NAMES)
def test_an_interface_that_lacks_a_function(lacking, tmp_path):
    less = FUNCTIONS.replace(f"def {lacking}(", "def another(")
    two = {"flash_attn/__init__.py": "", "flash_attn/flash_attn_interface.py": less}
    said = environment(tmp_path, ("flash-attn", "2.8.3", two), ("flash-attn-3", "3.0.0", {"flash_attn_interface.py": less}))
    for name, interface in (("flash2", "flash_attn.flash_attn_interface"), ("flash3", "flash_attn_interface")):
        assert "half of" in said[name] and f"{interface} has no {lacking};" in said[name] and "reinstall" in said[name]


@needs_nothing_installed
def test_2_before_it_read_caches(tmp_path):
    """2.2 brought the third function."""
    two = {**TWO, "flash_attn/flash_attn_interface.py": FUNCTIONS.replace(NAMES[2], "another")}
    assert environment(tmp_path / "before", ("flash-attn", "2.1.2", two))["flash2"] is None
    assert NAMES[2] in environment(tmp_path / "since", ("flash-attn", "2.2.0", two))["flash2"]


@needs_nothing_installed
def test_too_old_by_number_not_by_letters(tmp_path):
    assert "2.0.9" in environment(tmp_path / "old", ("flash-attn", "2.0.9", TWO))["flash2"]
    assert environment(tmp_path / "new", ("flash-attn", "2.10.0", TWO))["flash2"] is None
    assert environment(tmp_path / "newer", ("flash-attn", "10.0", TWO))["flash2"] is None


@needs_nothing_installed
def test_flash_attn_3_wherever_it_stands(tmp_path):
    config = "CONFIG = {'build_flags': {'FLASHATTENTION_DISABLE_BACKWARD': True}}\n"
    top = {"flash_attn_interface.py": FUNCTIONS, "flash_attn_config.py": config}
    assert environment(tmp_path / "top", ("flash-attn-3", "3.0.0", top))["flash3"] is None
    small = {"fa3_fwd_interface.py": FUNCTIONS, "fa3_fwd_config.py": config}
    assert environment(tmp_path / "small", ("fa3-fwd", "0.0.3", small))["flash3"] is None
    broken = environment(
        tmp_path / "broken",
        ("fa3-fwd", "0.0.3", {"fa3_fwd_interface.py": "raise OSError('libcudart.so.13')\n"}),
        ("flash-attn", "2.8.3", TWO),
    )
    assert "libcudart.so.13" in broken["flash3"] and broken["flash2"] is None


# ---------------------------------------------------------------------- true signatures, where the libraries' files are


def signature_in(path: Path, name: str) -> set[str]:
    tree = ast.parse(path.read_text())
    function = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    return {a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}


def files_of(distribution: str, name: str) -> Path:
    """A file of an installed distribution, or of a wheel unpacked where ATTNREG_TEST_WHEELS says."""
    from importlib.metadata import PackageNotFoundError, files

    try:
        return next(Path(f.locate()) for f in files(distribution) or () if str(f).endswith(name))
    except (PackageNotFoundError, StopIteration):
        found = list(Path(os.environ.get("ATTNREG_TEST_WHEELS", os.devnull)).glob(f"**/{name}"))
        if not found:
            pytest.skip(f"{distribution} is not installed, nor its wheel unpacked in ATTNREG_TEST_WHEELS")
        return found[0]


@pytest.mark.parametrize("name", flash4.NEEDED)
def test_true_signatures_of_flash4(name):
    assert set(flash4.NEEDED[name]) <= signature_in(files_of("flash-attn-4", "flash_attn/cute/interface.py"), name)


@pytest.mark.parametrize(("distribution", "name"), [("flash-attn-3", "flash_attn_interface.py"), ("fa3-fwd", "fa3_fwd_interface.py")])
def test_true_signatures_of_flash3(distribution, name):
    path = files_of(distribution, name)
    asked = {"softmax_scale", "causal", "window_size", "softcap"}
    assert asked | {"deterministic", "return_attn_probs"} <= signature_in(path, "flash_attn_func")
    names = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
    assert asked | names | {"deterministic", "return_attn_probs"} <= signature_in(path, "flash_attn_varlen_func")
    names = {"cache_seqlens", "cache_leftpad", "page_table", "return_softmax_lse"}
    assert asked | names <= signature_in(path, "flash_attn_with_kvcache")


def test_padding_between_the_keys_and_the_query_keeps_distances_from_fitting():
    right = Padding.from_lengths([3, 8], 8)
    assert spec(1, 8, key_mask=right, causal=True).padding_fits_packing
    assert not spec(1, 8, key_mask=right, causal=True, window=(2, None)).padding_fits_packing


@pytest.mark.parametrize("name", ["flash3", "flash4"])
def test_a_copy_of_the_values_is_named_where_it_is_made(name):
    """Kernels that read whole tiles get finite values past a row's end; pages are finite as they are."""
    notes = attnreg.backends()[name].notes
    spec = AttentionSpec(
        "cuda", (9, 0), torch.bfloat16, 8, 8, 64, 64, equal_lengths=False, causal=True, key_lengths=True, sizes=(2, 16, 64)
    )
    for changes, copies in (({}, True), ({"page_size": 64}, False), ({"finite_padding": True}, False), ({"gradients": ("query",)}, False)):
        assert any("cleans values" in note for note in notes(spec._replace(**changes))) == copies, changes


class Functions:
    """The two functions for dense tensors, which write down who was called."""

    def __init__(self):
        self.called, self.options = [], {}

    def flash_attn_func(self, query, key, value, **options):
        self.called.append("dense")
        return query

    def flash_attn_with_kvcache(self, query, key, value, cache_seqlens=None, **options):
        self.called.append("cached")
        self.options = options
        return query


@pytest.mark.parametrize(
    ("module", "queries", "gradients", "way"),
    [
        (flash2, 8, False, "cached"),
        (flash2, 512, False, "cached"),
        (flash2, 8, True, "dense"),
        (flash3, 8, False, "cached"),
        (flash3, 512, False, "dense"),
        (flash3, 8, True, "dense"),
    ],
)
def test_the_function_for_dense_tensors(module, queries, gradients, way, monkeypatch):
    functions = Functions()
    monkeypatch.setattr(module._Found, "where", Library("a library", "2.8.3", functions))
    monkeypatch.setattr(module._Found, "kernels", flash2.kernels("2.8.3"), raising=False)
    tensors = [torch.zeros(1, queries, 2, 8, requires_grad=gradients) for _ in range(3)]
    module._dense(AttentionCall(*tensors, causal=True), *tensors)
    assert functions.called == [way]


@pytest.mark.parametrize(
    ("version", "queries", "capturing", "named"),
    [
        ("2.8.3", 1, False, True),
        ("2.8.3", 64, False, True),
        ("2.8.3", 65, False, False),
        ("2.5.9", 1, False, False),
        ("2.8.3", 1, True, False),
    ],
)
def test_few_queries_take_the_kernel_that_splits_keys(version, queries, capturing, named, monkeypatch):
    """flash-attn 2 takes it for a buffer whose rows are named, if only as what they are, and not inside of a graph that meets them first."""
    functions = Functions()
    monkeypatch.setattr(flash2._Found, "where", Library("a library", version, functions))
    monkeypatch.setattr(flash2._Found, "kernels", flash2.kernels(version), raising=False)
    monkeypatch.setattr(flash2, "_rows", {})
    tensors = [torch.zeros(3, n, 2, 8) for n in (queries, 80, 80)]
    call = AttentionCall(*tensors, causal=True, key_lengths=torch.tensor([80, 7, 0]))
    call._spec = call.spec._replace(capturing=capturing)
    flash2._cached(call, *tensors, call.key_lengths, None, None)
    rows = functions.options.get("cache_batch_idx")
    assert (rows is not None) == named
    if named:
        assert rows.tolist() == [0, 1, 2] and rows.dtype == torch.int32
        call._spec = call.spec._replace(capturing=True)
        flash2._cached(call, *tensors, call.key_lengths, None, None)
        assert functions.options["cache_batch_idx"] is rows
    flash2._cached(call, *tensors, call.key_lengths, None, torch.zeros(3, 1, dtype=torch.int32))
    assert "cache_batch_idx" not in functions.options


@pytest.mark.parametrize(("gradients", "sizes"), [(False, {40}), (True, {64})])
def test_flash4_pads_head_dims_to_what_its_backward_gets_right(gradients, sizes, monkeypatch):
    """Seen on an H200: from the second tile of queries on, gradients of a head dim of 40 were those of another place."""
    seen = set()

    def flash_attn_func(query, key, value, **options):
        seen.update(t.shape[-1] for t in (query, key, value))
        return query, None

    monkeypatch.setattr(flash4, "library", lambda: Library("a library", "4.0.0b36", SimpleNamespace(flash_attn_func=flash_attn_func)))
    tensors = [torch.zeros(1, 4, 2, 36, requires_grad=gradients) for _ in range(3)]
    output = flash4.run_flash4(AttentionCall(*tensors, causal=True))
    assert seen == sizes and output.shape == (1, 4, 2, 36)


def test_flash4_takes_pages_of_whole_head_dims():
    claims = flash4.claims("4.0.0b36")
    paged = {"page_size": 16, "key_lengths": True, "equal_lengths": False, "single_query": True}
    for size, refused in ((64, set()), (80, set()), (40, {"paged"})):
        assert words(claims, spec(1, 64, dim=size)._replace(**paged)) == refused


def test_row_numbers_of_a_transform_are_not_kept(monkeypatch):
    """Inside of torch.func even what is made of nothing is wrapped, and dead afterwards."""
    functions = Functions()
    monkeypatch.setattr(flash2._Found, "where", Library("a library", "2.8.3", functions))
    monkeypatch.setattr(flash2._Found, "kernels", flash2.kernels("2.8.3"), raising=False)
    monkeypatch.setattr(flash2, "_rows", {})
    tensors = [torch.zeros(3, n, 2, 8) for n in (1, 9, 9)]

    def cached(scale):
        return (flash2._cached(AttentionCall(*tensors, causal=True), *tensors, None, None, None)[0] * scale).sum()

    torch.func.grad(cached)(torch.ones(()))
    assert not flash2._rows and "cache_batch_idx" not in functions.options
    with FakeTensorMode():
        fake = [torch.zeros(3, n, 2, 8) for n in (1, 9, 9)]
        flash2._cached(AttentionCall(*fake, causal=True), *fake, None, None, None)
    assert not flash2._rows
    cached(torch.ones(()))
    assert functions.options["cache_batch_idx"].tolist() == [0, 1, 2]
