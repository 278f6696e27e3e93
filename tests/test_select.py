"""Choosing, as a pure function: order, ranks, emulations, modes, and the reasons of everyone who was not chosen."""

import pytest
import torch

import attnreg
from attnreg import EMULATED, NATIVE, Capabilities, Feature, Reason
from attnreg.policy import Policy
from attnreg.select import NoBackendError, select

SPEC = attnreg.AttentionSpec("cpu", None, torch.float32, 4, 2, 16, 16)


def backend(name, *, priority=0, features=(Feature.GROUPED_HEADS, Feature.CAUSAL), bound=None, **options):
    given = features if isinstance(features, dict) else dict.fromkeys(features, NATIVE)
    claims = Capabilities(features=given, bound=bound)
    return attnreg.Backend(name=name, run=lambda call: name, capabilities=claims, priority=priority, **options)


def chosen(candidates, spec=SPEC, **policy):
    selection = select(spec, candidates, Policy(**policy))
    return selection.chosen and selection.chosen.name


def test_the_higher_rank_wins_and_the_others_are_able():
    selection = select(SPEC, [backend("low"), backend("high", priority=3), backend("middle", priority=2)], Policy())
    assert selection.chosen.name == "high" and selection.able == ("middle", "low") and selection.rejected == {}


def test_a_rank_may_depend_on_the_spec():
    moody = backend("moody", priority=lambda spec: 9 if spec.causal else -9)
    assert chosen([backend("steady"), moody], SPEC._replace(causal=True)) == "moody"
    assert chosen([backend("steady"), moody]) == "steady"


def test_native_goes_before_emulated_whatever_its_rank_unless_it_is_below_zero():
    copies = backend("copies", priority=90, features={Feature.GROUPED_HEADS: EMULATED("repeats heads"), Feature.CAUSAL: NATIVE})
    assert chosen([copies, backend("plain", priority=1)]) == "plain"
    assert chosen([copies, backend("last", priority=-1)]) == "copies"
    last = backend("last_copies", priority=-1, features={Feature.GROUPED_HEADS: EMULATED("repeats heads"), Feature.CAUSAL: NATIVE})
    assert chosen([last, backend("last", priority=-9)]) == "last"
    alike = SPEC._replace(key_heads=4)  # nothing to emulate
    assert chosen([copies, backend("plain", priority=1)], alike) == "copies"
    assert select(SPEC, [copies], Policy()).emulations == ("grouped_heads: repeats heads",)


def test_every_reason_is_given():
    narrow = attnreg.Backend(
        name="narrow",
        run=lambda call: call.query,
        missing=lambda: Reason("missing", "a library", "not installed", "install it"),
        capabilities=Capabilities(
            features={}, devices=("cuda",), dtypes=(torch.float16,), head_dim=attnreg.Dims(largest=8),
            rules=(lambda spec: Reason("softcap", "with a window", "one of them") if spec.softcap else None,),
        ),
    )  # fmt: skip
    spec = SPEC._replace(causal=True, softcap=True)
    selection = select(spec, [narrow], Policy())
    assert selection.chosen is None and selection.run is None
    reasons = {reason.what: reason for reason in selection.rejected["narrow"]}
    assert list(reasons) == ["missing", "device", "dtype", "head_dim", "causal", "softcap", "grouped_heads"]
    assert reasons["head_dim"][1:3] == ("16", "1 to 8") and reasons["dtype"].supported == "float16"
    assert reasons["softcap"].supported == "not claimed", "a rule adds nothing where the claim is missing already"
    text = str(NoBackendError(selection))
    assert all(word in text for word in ("narrow", "install it", "asked 16", "4 query heads on 2 key heads"))


def test_names_are_tried_in_order_and_families_by_rank():
    two, three = backend("flash2", priority=1, family="flash"), backend("flash3", priority=5, family="flash")
    other = backend("other", priority=99)
    assert chosen([two, three, other], order=("flash",)) == "flash3"
    assert chosen([two, three, other], order=("flash2", "flash")) == "flash2"
    assert chosen([two, three, other], order=("flash", "auto")) == "flash3"
    selection = select(SPEC, [two, three, other], Policy(order=("flash",), source="a test"))
    assert selection.able == ("flash2",)
    (reason,) = selection.rejected["other"]
    assert reason.what == "policy" and reason.remedy == "by a test"


def test_a_named_backend_that_cannot_leaves_nothing():
    assert chosen([backend("weak", features=()), backend("able")], order=("weak",)) is None


def test_approximate_backends_wait_for_leave():
    rough = backend("rough", priority=9, bound=10.0)
    assert chosen([rough, backend("exact")]) == "exact"
    (reason,) = select(SPEC, [rough, backend("exact")], Policy()).rejected["rough"]
    assert reason.what == "approximate" and "10.0" in reason.remedy
    assert chosen([rough, backend("exact")], allow=frozenset({"approximate"})) == "rough"
    assert chosen([rough, backend("exact")], order=("rough",)) == "rough"


def test_a_required_mode_must_be_claimed():
    sure = backend("sure", features=(Feature.GROUPED_HEADS, Feature.DETERMINISTIC))
    require = frozenset({Feature.DETERMINISTIC})
    assert chosen([backend("quick", priority=9), sure], require=require) == "sure"
    (reason,) = select(SPEC, [backend("quick"), sure], Policy(require=require)).rejected["quick"]
    assert reason.what == "deterministic" and "using" in reason.asked


def test_run_for_is_asked_once_with_the_spec():
    seen = []
    special = backend("special", run_for=lambda spec: seen.append(spec) or "the function")
    assert select(SPEC, [special], Policy()).run == "the function" and seen == [SPEC]


def test_a_selection_is_data_and_words():
    failures = (attnreg.registry.PluginFailure("a plugin", "broke", "repair it"),)
    first = backend("first", priority=1, notes=lambda spec: ["a copy is made"])
    selection = select(SPEC, [first, backend("second"), backend("third", features=())], Policy(), failures)
    data = selection.as_dict()
    assert (data["chosen"], data["able"], data["source"], data["notes"]) == ("first", ["second"], "automatic", ["a copy is made"])
    assert data["rejected"]["third"][0]["what"] == "grouped_heads" and data["spec"]["dtype"] == "torch.float32"
    text = str(selection)
    for words in (
        "first  (order auto: automatic)",
        "a copy is made",
        "able, lower in the order: second",
        "third was not chosen",
        "a plugin: broke",
    ):
        assert words in text
    assert __import__("json").loads(__import__("json").dumps(data)) == data
    assert repr(selection) == "<Selection: first  (order auto: automatic)>"


def test_who_was_named_comes_first_among_the_refused():
    selection = select(SPEC, [backend("high", priority=5), backend("named", features=())], Policy(("named",), "a test"))
    assert selection.chosen is None and list(selection.rejected) == ["named", "high"]


@pytest.mark.parametrize("feature", list(Feature))
def test_every_feature_that_a_call_can_ask_for_is_refused_by_who_claims_nothing(feature):
    """But pages, which are gathered for anybody, and batch invariance, which only a policy asks for."""
    asking = {
        "causal": dict(causal=True), "unequal_lengths": dict(causal=True, equal_lengths=False), "window": dict(window=(True, False)),
        "query_mask": dict(query_mask="left"), "key_mask": dict(key_mask="any"), "mask": dict(mask=(False,) * 4), "bias": dict(bias=(True,) * 4),
        "key_lengths": dict(key_lengths=True), "query_lengths": dict(query_lengths=True), "key_starts": dict(key_starts=True),
        "packed": dict(packed=True), "paged": dict(page_size=16), "alibi": dict(alibi="heads"), "softcap": dict(softcap=True),
        "sinks": dict(sinks=True), "scale": dict(scale=True), "dropout": dict(dropout=True), "lse": dict(return_lse=True),
        "grouped_heads": dict(key_heads=2), "value_dim": dict(value_dim=8), "backward": dict(gradients=("query",)),
        "bias_gradient": dict(gradients=("bias",)), "sinks_gradient": dict(gradients=("sinks",)),
        "alibi_gradient": dict(gradients=("alibi_slopes",)), "compile": dict(compiling=True), "capture": dict(capturing=True),
        "deterministic": dict(deterministic=True),
    }  # fmt: skip
    if feature in (Feature.LSE_GRADIENT, Feature.BATCH_INVARIANT):
        pytest.skip("no field of a spec asks for it: the lse is detached unless it is claimed; batch invariance is a policy's")
    spec = SPEC._replace(key_heads=4)._replace(**asking[feature.value])
    assert feature in spec.features
    refused = {reason.what for reason in Capabilities(features={}).reasons_against(spec)}
    assert (feature.value in refused) == (feature is not Feature.PAGED)


def test_a_backend_that_fails_to_say_what_it_will_do_harms_nobody_else():
    def raises(spec):
        raise RuntimeError("boom")

    notes = select(SPEC, [backend("noisy", priority=9, notes=raises), backend("plain")], Policy())
    assert notes.chosen.name == "noisy" and notes.notes == ("its notes raised RuntimeError: boom",)
    runs = select(SPEC, [backend("broken", priority=9, run_for=raises), backend("plain")], Policy())
    assert runs.chosen.name == "plain" and "boom" in str(runs.rejected["broken"][0])
