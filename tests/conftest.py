"""What holds for all tests: one thread each, so that several may run beside one another, and the thorough ones only when asked."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import pytest

THOROUGH = os.environ.get("ATTNREG_THOROUGH") == "1"


def pytest_collection_modifyitems(items):
    if THOROUGH:
        return
    for item in items:
        if item.get_closest_marker("thorough"):
            item.add_marker(pytest.mark.skip(reason="one more of a kind that another test shows; ATTNREG_THOROUGH=1 runs it"))


@pytest.fixture(autouse=True)
def policy_as_it_was():
    """No test leaves a policy behind for the next."""
    yield
    import attnreg

    if attnreg.policy.process.order is not None or attnreg.policy.process.layers:
        attnreg.use(None)
        for pattern in list(attnreg.policy.process.layers):
            attnreg.use(None, layers=pattern)
