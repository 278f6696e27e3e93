"""What a backend claims, and the reasons it has against a call.

"Supported" is *defined* as "there are no reasons against". One function decides, explains and feeds the error, so the three
cannot drift apart. A claim that is not made is a no.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .spec import AttentionSpec, Feature


class Reason(NamedTuple):
    """Why a backend can't take a call: what was asked, what it could do, and what would help."""

    what: str
    """A `Feature`'s word ("window"), or one of: missing, broken, device, capability, dtype, head_dim,
    value_dim, batch, approximate, policy."""
    asked: str
    supported: str
    remedy: str = ""

    def __str__(self) -> str:
        if self.what == "policy":
            text = f"policy: only {self.asked} may run"
        elif self.what == "missing":
            text = f"missing: {self.asked}, {self.supported}"
        elif self.asked == "yes":
            text = f"{self.what}: {self.supported}"
        else:
            text = f"{self.what}: asked {self.asked}, supported {self.supported}"
        return f"{text}; {self.remedy}" if self.remedy else text


class Support(NamedTuple):
    """How a claimed feature is provided: by the kernel itself (`NATIVE`), or at a cost that the explanation names."""

    cost: str = ""

    @property
    def native(self) -> bool:
        return not self.cost

    def __str__(self) -> str:
        return f"emulated ({self.cost})" if self.cost else "native"


NATIVE = Support()


def EMULATED(cost: str) -> Support:
    """A feature that the backend gives by extra work. `cost` says which, e.g. "repeats key and value heads"."""
    if not cost:
        raise ValueError("EMULATED needs the cost in words: what is copied, built or computed besides the kernel's own work")
    return Support(cost)


_GATHERED = EMULATED("gathers the pages into copies of key and value where they do not lie one behind the other")


class Dims(NamedTuple):
    """The head dims that a backend takes, padding of its own included."""

    largest: int | None = None
    multiple: int = 1
    smallest: int = 1
    only: tuple[int, ...] = ()

    def takes(self, size: int) -> bool:
        return (
            size >= self.smallest
            and (self.largest is None or size <= self.largest)
            and size % self.multiple == 0
            and (not self.only or size in self.only)
        )

    def __str__(self) -> str:
        if self.only:
            return f"one of {', '.join(map(str, self.only))}"
        text = f"{self.smallest} to {self.largest}" if self.largest is not None else f"{self.smallest} or more"
        return f"{text}, a multiple of {self.multiple}" if self.multiple > 1 else text


Rule = Callable[[AttentionSpec], "Reason | None"]
Claim = Support | Callable[[AttentionSpec], Support]
"""How a feature is provided; as a function of the spec where a backend has several kernels inside."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend claims. Everything left out is a no.

    `rules` refuse what single claims can't say, such as two features that exclude each other; each is a pure function of the
    spec that returns a `Reason` or None. `bound` is the error bound of an approximate backend, as a multiple of the measured
    tolerance (contract, "Numbers"); None means exact. `exceptions` are the checks of the conformance suite that an approximate
    backend fails by its nature, each with the reason in words: they are run, must fail, and stand in its certificate.
    """

    features: Mapping[Feature, Claim]
    devices: Collection[str] = ("cpu",)
    dtypes: Collection[torch.dtype] = (torch.float32,)
    head_dim: Dims = Dims()
    value_dim: Dims = Dims()
    smallest_capability: tuple[int, int] | None = None
    largest_capability: tuple[int, int] | None = None
    rules: tuple[Rule, ...] = field(default=())
    bound: float | None = None
    exceptions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, support in self.features.items():
            if not isinstance(name, Feature) or not (isinstance(support, Support) or callable(support)):
                raise TypeError(
                    f"features: a claim maps a Feature to NATIVE or EMULATED(cost), got {name!r}: {support!r}; "
                    f"the features are {', '.join(Feature)}"
                )
        if self.exceptions and self.bound is None:
            raise ValueError(
                f"exceptions: only beside a bound, got {dict(self.exceptions)!r}: who does not keep the whole contract must be left out "
                "of automatic choice; declare bound=1.0 if the numbers are exact"
            )
        if not all(isinstance(why, str) and why for why in self.exceptions.values()):
            raise ValueError(f"exceptions: a check's name with the reason why it fails in words, got {dict(self.exceptions)!r}")

    def reasons_against(self, spec: AttentionSpec) -> tuple[Reason, ...]:
        """Every reason why this backend can't give exactly what the spec asks; empty means it can."""
        reasons = []
        if spec.device not in self.devices:
            reasons.append(Reason("device", spec.device, ", ".join(sorted(self.devices))))
        elif spec.capability is not None:
            low, high = self.smallest_capability, self.largest_capability
            if (low is not None and spec.capability < low) or (high is not None and spec.capability > high):
                span = (
                    f"{version_text(low)} to {version_text(high)}"
                    if low and high
                    else f"{version_text(low)} or newer"
                    if low
                    else f"up to {version_text(high)}"
                )
                reasons.append(Reason("capability", version_text(spec.capability), span))
        if spec.dtype not in self.dtypes:
            reasons.append(Reason("dtype", dtype_name(spec.dtype), ", ".join(sorted(map(dtype_name, self.dtypes)))))
        if not self.head_dim.takes(spec.head_dim):
            reasons.append(Reason("head_dim", str(spec.head_dim), str(self.head_dim)))
        if not self.value_dim.takes(spec.value_dim) and spec.value_dim != spec.head_dim:
            reasons.append(Reason("value_dim", str(spec.value_dim), str(self.value_dim)))
        for feature in spec.features:
            if feature not in self.features and feature is not Feature.PAGED:
                reasons.append(Reason(feature.value, _asked(feature, spec), "not claimed"))
        seen = {reason.what for reason in reasons}
        for rule in self.rules:
            reason = rule(spec)
            if reason is not None and reason.what not in seen:
                reasons.append(reason)
        return tuple(reasons)

    def emulations(self, spec: AttentionSpec) -> tuple[str, ...]:
        """What giving this spec costs beyond the kernel: "feature: cost" for every emulated feature it asks for."""
        claimed = ((f, self.support(f, spec)) for f in spec.features if f in self.features or f is Feature.PAGED)
        return tuple(f"{feature.value}: {support.cost}" for feature, support in claimed if support.cost)

    def support(self, feature: Feature, spec: AttentionSpec) -> Support:
        """How a claimed feature is provided for this spec. Pages that a kernel can't read are gathered before it runs."""
        claim = self.features.get(feature, _GATHERED) if feature is Feature.PAGED else self.features[feature]
        return claim if isinstance(claim, Support) else claim(spec)


def version_text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _asked(feature: Feature, spec: AttentionSpec) -> str:
    """The asked value in words, where "yes" would say too little."""
    if feature is Feature.GROUPED_HEADS:
        return f"{spec.query_heads} query heads on {spec.key_heads} key heads"
    if feature is Feature.VALUE_DIM:
        return f"value dim {spec.value_dim} with head dim {spec.head_dim}"
    if feature is Feature.UNEQUAL_LENGTHS:
        return "causal, window or alibi with different query and key lengths"
    if feature is Feature.BACKWARD:
        return "gradients of " + ", ".join(spec.gradients)
    if feature is Feature.PAGED:
        return f"pages of {spec.page_size} slots"
    if feature in (Feature.KEY_MASK, Feature.QUERY_MASK):
        return f"padding of form {getattr(spec, feature.value)!r}"
    return "yes"
