"""Every backend there is: built-in, registered, or of plugins, good and bad, each loaded alone."""

from __future__ import annotations

import importlib.metadata
import threading
import types

import pytest
import torch

import attnreg
from attnreg import NATIVE, Backend, Capabilities, Feature, hookimpl, registry

x = torch.ones(1, 2, 1, 8)


def backend(name, **options):
    return Backend(name=name, run=lambda call: call.query, capabilities=Capabilities(features={Feature.CAUSAL: NATIVE}), **options)


def plugin(name, answer, hook="attnreg_backends"):
    """A module with one hook."""

    def function():
        return answer() if callable(answer) else answer

    function.__name__ = hook
    module = types.ModuleType(name)
    setattr(module, hook, hookimpl(function))
    return module


class Entry:
    """An entry point as `importlib.metadata` gives them; the fields that are read."""

    dist = None

    def __init__(self, name, load):
        self.name, self.value, self._load = name, f"{name}:module", load

    def load(self):
        return self._load() if isinstance(self._load, types.FunctionType) else self._load


@pytest.fixture
def install(monkeypatch):
    """A registry that has loaded nothing, in a process where only these plugins are installed."""
    monkeypatch.setattr(registry, "_registry", registry._Registry())
    monkeypatch.delenv("ATTNREG_STRICT_PLUGINS", raising=False)

    def give(*entries):
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: list(entries) if group == "attnreg" else [])

    give()
    yield give
    attnreg.policy.changed()


def failures():
    return {failure.plugin: failure for failure in registry.failures()}


def test_built_in_backends_come_by_the_same_door(install):
    assert {"sdpa", "reference", "flash2", "flex"} <= set(attnreg.backends())
    assert registry.origin("sdpa") == "attnreg" and registry.failures() == ()


def test_the_mapping_is_read_only_and_in_order(install):
    attnreg.register(backend("top", priority=10_000))
    attnreg.register(backend("bottom", priority=-10_000))
    names = list(attnreg.backends())
    assert names[0] == "top" and names[-1] == "bottom"
    with pytest.raises(TypeError):
        attnreg.backends()["mine"] = backend("mine")


def test_who_is_stood_in_for_is_back_as_who_brought_it(install):
    before, order = attnreg.backends()["sdpa"], list(attnreg.backends())
    for stand_in in (backend("sdpa", priority=10_000), backend("mine")):
        with registry.standing_in(stand_in):
            assert attnreg.backends()[stand_in.name] is stand_in and registry.origin(stand_in.name) == "register()"
        assert attnreg.backends().get("sdpa") is before and registry.origin("sdpa") == "attnreg"
        assert list(attnreg.backends()) == order


def test_register_takes_effect_at_once_and_unregister_too(install):
    attnreg.attention(x, x, x, causal=True)
    before = attnreg.last_selection().chosen.name
    attnreg.register(backend("mine", priority=10_000))
    attnreg.attention(x, x, x, causal=True)
    assert attnreg.last_selection().chosen.name == "mine" and registry.origin("mine") == "register()"
    attnreg.unregister("mine")
    attnreg.attention(x, x, x, causal=True)
    assert attnreg.last_selection().chosen.name == before
    with pytest.raises(LookupError, match="mine"):
        attnreg.attention(x, x, x, backend="mine")


def test_a_taken_name_needs_override(install):
    first, second = backend("mine"), backend("mine", priority=1)
    attnreg.register(first)
    with pytest.raises(ValueError, match=r"mine.*register\(\).*override=True"):
        attnreg.register(second)
    assert attnreg.backends()["mine"] is first
    attnreg.register(second, override=True)
    assert attnreg.backends()["mine"] is second


def test_a_name_is_never_a_family_too(install):
    for wrong in (backend("flash"), backend("mine", family="sdpa")):
        with pytest.raises(ValueError, match="family"):
            attnreg.register(wrong)
        assert wrong.name not in attnreg.backends()


def test_register_takes_backends_only(install):
    with pytest.raises(TypeError, match=r"attnreg\.Backend, got str"):
        attnreg.register("sdpa")


@pytest.mark.parametrize("call", [attnreg.unregister, lambda name: registry.check_name(name, "backend"), attnreg.use])
def test_an_unknown_name_is_told_the_nearest(install, call):
    with pytest.raises(LookupError) as raised:
        call("spda")
    assert all(word in str(raised.value) for word in ("'spda'", "did you mean 'sdpa'?", "reference"))


def test_families_and_auto_are_names_of_choice_only(install):
    for name in ("flash", "auto"):
        registry.check_name(name, "backend")
        with pytest.raises(LookupError, match=name):
            attnreg.unregister(name)


def test_good_plugins_load(install):
    install(Entry("one", plugin("one", [backend("first"), backend("second")])), Entry("two", plugin("two", lambda: [backend("third")])))
    assert {"first", "second", "third"} <= set(attnreg.backends()) and registry.failures() == ()
    assert registry.origin("second") == "one" and set(registry.import_seconds()) == {"one", "two"}


def raising(error):
    def function():
        raise error

    return function


def bad_claim():
    return Backend(name="odd", run=lambda call: call.query, capabilities=lambda: Capabilities(features={"causal!": NATIVE}))


def with_helper():
    """A module whose hook is fine, beside one with a name that nobody calls."""
    module = plugin("half", [backend("half")])
    extra = lambda: []
    module.attnreg_backend = hookimpl(extra)
    return module


# the plugin, words of its failure, backends of it that are there all the same
BAD = {
    "import error": (raising(ImportError("no libfast.so")), ["import of bad:module", "ImportError", "no libfast.so"], []),
    "exit at import": (raising(SystemExit(3)), ["SystemExit"], []),
    "misspelt hook": (
        plugin("bad", [backend("lost")], hook="attnreg_backend"),
        ["'attnreg_backend'", "did you mean 'attnreg_backends'"],
        [],
    ),
    "misspelt beside a right one": (with_helper(), ["unknown hook 'attnreg_backend'"], ["half"]),
    "no hook": (types.ModuleType("bad"), ["implements no hook", "hookimpl"], []),
    "raising hook": (plugin("bad", raising(RuntimeError("no card"))), ["its hook raised RuntimeError: no card"], []),
    "hook returns nothing": (plugin("bad", 7), ["TypeError"], []),
    "duplicate": (plugin("bad", [backend("sdpa")]), ["'sdpa'", "taken by attnreg"], []),
    "no backend": (plugin("bad", ["sdpa"]), ["'sdpa'", "no attnreg.Backend"], []),
    "malformed claim": (plugin("bad", [bad_claim()]), ["causal!", "NATIVE or EMULATED"], []),
    "one of two": (plugin("bad", [bad_claim(), backend("sound")]), ["causal!", "others are not"], ["sound"]),
}


@pytest.mark.parametrize(("load", "words", "there"), BAD.values(), ids=BAD)
def test_a_bad_plugin_fails_alone_and_is_shown(install, monkeypatch, load, words, there):
    """Its failure stands in `explain`, in a LookupError and among `failures`; a plugin loaded after it is well; STRICT raises."""
    install(Entry("bad", load), Entry("good", plugin("good", [backend("good")])))
    names = set(attnreg.backends())
    assert "good" in names and "reference" in names and set(there) <= names
    assert names & {"lost", "odd", "half", "sound"} == set(there)
    assert registry.origin("sdpa") == "attnreg"
    failure = str(failures()["bad"])
    assert [word for word in words if word not in failure] == [], failure
    attnreg.policy.changed()
    assert "plugin failed: bad" in str(attnreg.explain(x, x, x))
    with pytest.raises(LookupError) as raised:
        attnreg.attention(x, x, x, backend="lost")
    assert failure in str(raised.value)

    monkeypatch.setattr(registry, "_registry", registry._Registry())
    monkeypatch.setenv("ATTNREG_STRICT_PLUGINS", "1")
    with pytest.raises(registry.PluginError) as strict:
        attnreg.backends()
    assert str(strict.value).startswith("bad: ")
    monkeypatch.delenv("ATTNREG_STRICT_PLUGINS")
    assert "good" in attnreg.backends(), "a failed load is tried again, not half kept"


def no_answer(*args):
    raise OSError("libmine.so: cannot open shared object file")


@pytest.mark.parametrize(
    "broken",
    [
        {"missing": no_answer},
        {"missing": lambda: "not here"},
        {"priority": lambda spec: no_answer() if spec.device == "cpu" else 1},
        {"capabilities": Capabilities(features={Feature.BACKWARD: NATIVE}, rules=(no_answer,))},
        {"capabilities": Capabilities(features={Feature.BACKWARD: lambda spec: no_answer()})},
    ],
    ids=["missing", "missing is no reason", "priority", "rule", "claim"],
)
def test_a_backend_that_breaks_when_asked_harms_nobody_elses_calls(install, monkeypatch, broken):
    whole = {"capabilities": Capabilities(features={Feature.BACKWARD: NATIVE})}
    install(Entry("bad", plugin("bad", [Backend(name="broken", run=lambda call: call.query, **{**whole, **broken})])))
    given = torch.ones(1, 2, 1, 8, requires_grad=True)
    torch.testing.assert_close(attnreg.attention(given, given, given), given)
    assert "broken" in attnreg.explain(given, given, given).rejected
    with pytest.raises(attnreg.NoBackendError, match=r"libmine|'not here'"):
        attnreg.attention(given, given, given, backend="broken")


@pytest.mark.parametrize("priority", [lambda spec: None, "high", lambda spec: no_answer()])
def test_a_malformed_priority_shows_when_it_is_registered(install, priority):
    made = Backend(name="broken", run=lambda call: call.query, capabilities=Capabilities(features={}), priority=priority)
    with pytest.raises((TypeError, OSError), match=r"priority of backend 'broken'|libmine"):
        attnreg.register(made)
    install(Entry("bad", plugin("bad", [made])))
    attnreg.attention(x, x, x)
    assert "broken" not in attnreg.backends()


def test_malformed_capabilities_show_when_they_are_registered(install):
    with pytest.raises(TypeError, match="capabilities of backend 'broken'"):
        attnreg.register(Backend(name="broken", run=lambda call: call.query, capabilities=lambda: 3))
    attnreg.attention(x, x, x)


def test_an_interrupt_is_no_plugin_failure(install):
    install(Entry("bad", raising(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        attnreg.backends()


def test_a_plugin_may_ask_attnreg_while_it_loads(install):
    seen = []
    install(Entry("asks", lambda: seen.append(list(attnreg.backends())) or plugin("asks", [backend("asked")])))
    assert "asked" in attnreg.backends() and "sdpa" in seen[0]


def test_a_thread_that_comes_while_plugins_load_waits_for_all_of_them(install, monkeypatch):
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


def test_a_load_that_failed_leaves_nothing_behind(install, monkeypatch):
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


def test_an_lse_of_another_shape_is_refused():
    claims = Capabilities(features={Feature.LSE: NATIVE})
    attnreg.register(Backend(name="wrong", run=lambda call: (call.query, torch.zeros(1)), capabilities=claims))
    query = torch.zeros(1, 2, 3, 4)
    try:
        with pytest.raises(ValueError, match=r"backend 'wrong'.*\(1,\) as the lse, which is \(1, 3, 2\)"):
            attnreg.attention(query, query, query, backend="wrong", return_lse=True)
    finally:
        attnreg.unregister("wrong")
    assert registry.origin("wrong") == ""


def test_a_backend_is_not_its_own_family():
    with pytest.raises(ValueError, match="a backend and a family at once"):
        attnreg.register(Backend(name="mine", run=lambda call: call.query, capabilities=Capabilities(features={}), family="mine"))
