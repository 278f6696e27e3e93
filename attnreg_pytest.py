"""`pytest --attnreg-backend NAME`: adds the conformance suite of a backend to a run. Loaded in every user's pytest: imports pytest only."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attnreg", "conformance of attention backends")
    group.addoption(
        "--attnreg-backend", action="append", default=[], metavar="NAME", help="run attnreg's suite on this backend too; repeatable"
    )
    group.addoption(
        "--attnreg-device", default=None, metavar="DEVICE", help="cpu or cuda; by default those that the backend claims and are here"
    )
    group.addoption(
        "--attnreg-profile",
        default="ci",
        metavar="PROFILE",
        help="how much is tried: ci (the same calls every time), thorough, large, or jit (few kinds of calls)",
    )


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    for name in config.getoption("--attnreg-backend"):
        from attnreg.conformance import PROFILES, conformance_suite

        device, profile = config.getoption("--attnreg-device"), config.getoption("--attnreg-profile")
        if profile not in PROFILES:
            raise pytest.UsageError(f"--attnreg-profile: {', '.join(PROFILES)}, got {profile!r}")
        try:
            suite = conformance_suite(name, devices=None if device is None else [device], profile=profile)
        except LookupError as error:
            raise pytest.UsageError(f"--attnreg-backend: {error.args[0]}") from error
        module = _Suite.from_parent(session, name=f"attnreg[{name}]", path=config.rootpath, suite=suite)
        items.extend(module.collect())


class _Suite(pytest.Collector):
    """The checks of one backend, which stand in no file."""

    def __init__(self, *, suite: type, **given) -> None:
        super().__init__(**given)
        self.suite = suite

    def collect(self):
        return [_Check.from_parent(self, name=name, run=run) for name, run in vars(self.suite).items() if name.startswith("test_")]


class _Check(pytest.Item):
    def __init__(self, *, run, **given) -> None:
        super().__init__(**given)
        self.run = run

    def runtest(self) -> None:
        self.run(None)

    def reportinfo(self):
        return self.path, None, f"{self.parent.name} {self.name}"
