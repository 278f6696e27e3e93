"""The conformance suite over what this backend claims. XLA compiles for every shape, about a second each, so examples are few."""

from __future__ import annotations

from attnreg.conformance import Profile, conformance_suite

TestJax = conformance_suite("jax", profile=Profile(12, 3, "eager"))
