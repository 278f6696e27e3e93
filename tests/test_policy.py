"""Who may run: precedence, scopes in threads and tasks, layers, expectations."""

import asyncio
import threading

import pytest
import torch

import attnreg
from attnreg import policy

x = torch.ones(1, 2, 1, 8)


def ran(**options):
    attnreg.attention(x, x, x, **options)
    return attnreg.last_selection().chosen.name


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv("ATTNREG_BACKEND", raising=False)
    yield
    attnreg.use(None)


def test_precedence(monkeypatch):
    automatic = ran()
    assert automatic != "reference"
    monkeypatch.setenv("ATTNREG_BACKEND", "reference")
    attnreg.use(None)
    assert ran() == "reference" and "ATTNREG_BACKEND" in attnreg.explain(x, x, x).source
    attnreg.use("sdpa")
    assert ran() == "sdpa" and "use(" in attnreg.explain(x, x, x).source
    with attnreg.using("reference"):
        assert ran() == "reference" and "using(" in attnreg.explain(x, x, x).source
        assert ran(backend="sdpa") == "sdpa"
    assert ran() == "sdpa"


def test_lists_are_tried_in_order_and_nothing_else():
    assert ran(backend=["flash3", "reference", "sdpa"]) == "reference"
    assert ran(backend=["flash3", "auto"]) == ran()
    with pytest.raises(attnreg.NoBackendError, match="flash3"):
        ran(backend=["flash3"])


def test_use_checks_the_name_at_once_and_keeps_what_was():
    attnreg.use("reference")
    with pytest.raises(LookupError, match="reference"):
        attnreg.use("referense")
    with pytest.raises(TypeError, match="layers: a pattern"):
        attnreg.use("sdpa", layers=5)
    assert ran() == "reference" and ran(layer="x") == "reference"


def test_what_is_no_name_or_word_is_said():
    with pytest.raises(TypeError, match="backend: a backend's name or a list"):
        ran(backend={"sdpa"})
    with pytest.raises(TypeError, match="require: a set of words among deterministic"), attnreg.using(require=None):
        pass


def test_the_most_specific_layer_pattern_wins():
    attnreg.use("sdpa", layers="model.*")
    attnreg.use("reference", layers="model.layers.[0-3].*")
    try:
        assert ran(layer="model.layers.2.attn") == "reference"
        assert ran(layer="model.layers.7.attn") == "sdpa"
    finally:
        attnreg.use(None, layers="model.*")
        attnreg.use(None, layers="model.layers.[0-3].*")


def test_using_stays_in_its_thread_and_task():
    seen = []
    with attnreg.using("reference"):
        thread = threading.Thread(target=lambda: seen.append(ran()))
        thread.start()
        thread.join()
    assert seen == [ran()] and seen != ["reference"]

    async def task(name):
        with attnreg.using(name):
            await asyncio.sleep(0)
            first = ran()
            await asyncio.sleep(0)
            return first, ran()

    async def both():
        return await asyncio.gather(task("sdpa"), task("reference"))

    assert asyncio.run(both()) == [("sdpa", "sdpa"), ("reference", "reference")]
    assert ran() != "reference"


def test_what_compiled_code_sees_after_tasks_that_took_turns():
    compiled = torch.compile(lambda q: attnreg.attention(q, q, q), backend="eager", fullgraph=True)

    async def first():
        with attnreg.using("reference"):
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def second():
        with pytest.raises(Exception, match="no await between"):
            compiled(torch.randn(1, 2, 1, 8))
        with attnreg.using("sdpa"):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def both():
        await asyncio.gather(first(), second())

    asyncio.run(both())
    assert policy.mirror.scope == 0
    with attnreg.using("sdpa"):
        compiled(torch.randn(1, 2, 1, 8))


def test_expect_fails_on_anything_else():
    with attnreg.expect("sdpa"):
        assert ran(backend="sdpa") == "sdpa"
        with pytest.raises(AssertionError, match="reference"):
            ran(backend="reference")


def test_blocks_of_tasks_that_end_out_of_order_leave_nothing_in_force():
    async def main():
        first, second = asyncio.Event(), asyncio.Event()

        async def early():
            with attnreg.using("reference"):
                first.set()
                await second.wait()

        async def late():
            await first.wait()
            with attnreg.using("sdpa"):
                second.set()
                await asyncio.sleep(0.01)

        await asyncio.gather(early(), late())

    asyncio.run(main())
    # What compiled code guards on, in this thread.
    assert attnreg.policy.mirror.scope == 0 and attnreg.policy.current_scope.get() is None


def test_a_pattern_set_by_another_thread_while_one_looks(monkeypatch):
    attnreg.use("sdpa", layers="other.*")
    attnreg.use("reference", layers="model.*")
    matches, meanwhile = attnreg.policy.fnmatch.fnmatchcase, iter(["new.*"])

    def interrupted(name, pattern):
        for other in meanwhile:
            threading.Thread(target=attnreg.use, args=("sdpa",), kwargs={"layers": other}).start()
            threading.Event().wait(0.05)
        return matches(name, pattern)

    monkeypatch.setattr(attnreg.policy.fnmatch, "fnmatchcase", interrupted)
    try:
        assert ran(layer="model.1") == "reference"
    finally:
        for pattern in ("other.*", "model.*", "new.*"):
            attnreg.use(None, layers=pattern)


def test_a_choice_that_a_change_overtakes_is_not_remembered():
    """As when another thread calls `use` between a choice and its being remembered."""
    changes = []

    def rank(spec):
        if changes and spec.device == "cpu":
            changes.pop()()
        return -1000

    backend = attnreg.Backend("slow_to_rank", lambda call: call.query, attnreg.Capabilities({}), priority=rank)
    attnreg.register(backend)
    try:
        changes.append(lambda: attnreg.use("reference"))
        y = x.clone()
        attnreg.attention(x, y, y + 1)
        assert not changes
        attnreg.attention(x, y, y + 1)
        assert attnreg.last_selection().chosen.name == "reference"
    finally:
        attnreg.unregister("slow_to_rank")


def test_required_determinism_is_a_mode_of_the_call():
    attnreg.attention(x, x, x)
    with attnreg.using(require={"deterministic"}):
        attnreg.attention(x, x, x)
        assert attnreg.last_selection().spec.deterministic
        assert attnreg.explain(x, x, x).spec.deterministic
        cuda = attnreg.AttentionSpec("cuda", (9, 0), torch.float32, 4, 4, 64, 64, gradients=("query",))
        assert "sdpa" in attnreg.explain_spec(cuda).rejected
    attnreg.attention(x, x, x)
    assert not attnreg.last_selection().spec.deterministic


def test_one_process_has_one_answer_of_the_environment(monkeypatch):
    """Read with the first choice after a change of the policy, since choices are remembered."""
    before = ran()
    monkeypatch.setenv("ATTNREG_BACKEND", "reference")
    assert ran() == ran(causal=True) == before
    attnreg.use(None)
    assert ran() == ran(causal=True) == "reference"
    monkeypatch.delenv("ATTNREG_BACKEND")
    assert ran() == ran(scale=0.3) == "reference"


def test_a_list_of_names_is_remembered_as_one_name_is(monkeypatch):
    assert ran(backend=["flash3", "sdpa"]) == "sdpa"

    def checked(*arguments):
        raise AssertionError("checked again")

    monkeypatch.setattr(attnreg.attention.__globals__["_checked"].__globals__["AttentionCall"], "__init__", checked)
    assert ran(backend=["flash3", "sdpa"]) == "sdpa"


def test_the_characters_of_a_class_are_not_literal():
    attnreg.use("reference", layers="layers.3.*")
    attnreg.use("sdpa", layers="layers.[0-9].*")
    assert ran(layer="layers.3.attn") == "reference" and ran(layer="layers.4.attn") == "sdpa"
    for pattern in ("layers.3.*", "layers.[0-9].*"):
        attnreg.use(None, layers=pattern)
