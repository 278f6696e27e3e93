"""The automatic order on CUDA: every built-in backend has its place in it, and every kind of call a line."""

from __future__ import annotations

import torch

import attnreg
from attnreg import registry
from attnreg.kernels.order import ORDER, kind
from attnreg.spec import AttentionSpec

PREFILL = AttentionSpec("cuda", (9, 0), torch.bfloat16, 32, 8, 64, 64, causal=True, sizes=(2, 2048, 2048))
ONE = {"equal_lengths": False, "single_query": True, "sizes": (1, 1, 4096)}
KINDS = {
    "short": {"sizes": (2, 1024, 1024)},
    "long": {"head_dim": 128, "value_dim": 128},
    "long, narrow and grouped": {},
    "one query of few rows": ONE,
    "one query": {**ONE, "sizes": (32, 1, 4096), "key_mask": "left"},
    "one query, lengths": {**ONE, "key_lengths": True, "sizes": (16, 1, 4096)},
    "one query, many lengths": {**ONE, "key_lengths": True, "sizes": (64, 1, 4096)},
    "one query, window": {**ONE, "window": (True, False)},
    "one query, softcap": {**ONE, "softcap": True},
    "few queries": {"equal_lengths": False, "sizes": (2, 16, 4096)},
    "unequal": {"equal_lengths": False, "sizes": (2, 512, 4096)},
    "window": {"window": (True, False)},
    "training": {"gradients": ("query",)},
    "training, odd": {"gradients": ("query",), "head_dim": 80, "value_dim": 80},
    "softcap": {"softcap": True},
    "left padded": {"key_mask": "left"},
    "padded": {"key_mask": "right"},
    "padded, training": {"key_mask": "left", "gradients": ("query",)},
    "packed": {"packed": True},
    "packed, training": {"packed": True, "gradients": ("query",)},
    "masked": {"mask": (True, False, True, True)},
}


def test_every_kind_has_its_line():
    assert KINDS.keys() == ORDER.keys()
    for name, changes in KINDS.items():
        assert kind(PREFILL._replace(**changes)) == name
    assert kind(PREFILL._replace(sizes=(2, 1024, 1024), gradients=("query",))) == "training"
    assert kind(PREFILL._replace(key_heads=32)) == "long"
    assert kind(PREFILL._replace(window=(True, False), gradients=("query",))) == "window"


def test_ranks_follow_the_line_and_stay_above_the_fallbacks():
    # Plugins that are installed have ranks of their own.
    backends = {name: backend for name, backend in attnreg.backends().items() if registry.origin(name) == "attnreg"}
    for name, changes in KINDS.items():
        spec = PREFILL._replace(**changes)
        ranks = [backends[backend].rank(spec) for backend in ORDER[name].split()]
        assert ranks == sorted(ranks, reverse=True) and len(set(ranks)) == len(ranks)
        assert min(ranks) > max(b.rank(spec) for b in backends.values() if b.name not in ORDER[name].split())


def test_keys_that_grow_do_not_go_to_cudnn():
    growing = PREFILL._replace(**ONE)
    ranks = {name: backend.rank(growing) for name, backend in attnreg.backends().items()}
    assert ranks["cudnn"] < ranks["flash2"]


def test_unknown_lengths_are_taken_for_short():
    assert kind(PREFILL._replace(sizes=None)) == "short"
