"""Which backends there are: loading once, and changes while other threads look."""

import threading

import pytest

import attnreg
from attnreg import registry


@pytest.fixture
def empty(monkeypatch):
    """A registry that nothing has loaded yet."""
    monkeypatch.setattr(registry, "_registry", registry._Registry())


def test_a_thread_that_comes_while_plugins_load_waits_for_all_of_them(empty, monkeypatch):
    begun, release, seen = threading.Event(), threading.Event(), []
    load_all = registry._load_all

    def slow():
        begun.set()
        assert release.wait(20)
        load_all()

    monkeypatch.setattr(registry, "_load_all", slow)
    first = threading.Thread(target=registry.load)
    second = threading.Thread(target=lambda: seen.append(set(attnreg.backends())))
    first.start()
    assert begun.wait(20)
    second.start()
    second.join(0.1)
    assert not seen
    release.set()
    first.join(20), second.join(20)
    assert seen and {"sdpa", "reference"} <= seen[0]


def test_a_plugin_that_asks_while_it_is_loaded_sees_what_is_there(empty, monkeypatch):
    seen = []
    load_all = registry._load_all

    def curious():
        load_all()
        seen.append(set(attnreg.backends()))

    monkeypatch.setattr(registry, "_load_all", curious)
    registry.load()
    assert {"sdpa", "reference"} <= seen[0]


def test_a_load_that_failed_leaves_nothing_behind(empty, monkeypatch):
    load_all, fail = registry._load_all, [True]

    def once():
        load_all()
        if fail:
            fail.clear()
            raise registry.PluginError("broken")

    monkeypatch.setattr(registry, "_load_all", once)
    with pytest.raises(registry.PluginError):
        registry.load()
    assert {"sdpa", "reference"} <= set(attnreg.backends()) and not any("taken" in str(f) for f in registry.failures())
