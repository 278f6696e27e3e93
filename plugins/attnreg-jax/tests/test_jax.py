"""The conformance suite over what this backend claims, and what is special to it."""

from __future__ import annotations

from attnreg.conformance import conformance_suite

TestJax = conformance_suite("jax")
