"""What every backend is proven by, from its own claims: `TestMine = conformance_suite(my_backend)`."""

from .caches import cache_suite
from .report import Outcome, Report
from .suite import PROFILES, Profile, conformance_suite, reproduce, run_checks

__all__ = ["PROFILES", "Outcome", "Profile", "Report", "cache_suite", "conformance_suite", "reproduce", "run_checks"]
