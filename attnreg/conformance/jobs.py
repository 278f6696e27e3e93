"""Checks in several processes: each check's calls in parts, so that no process is left with the longest check alone.

A process of its own also bounds the harm: one that dies, or that leaves its device unusable, is replaced, and the calls of others go on.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import torch

from .report import OUT_OF_TIME, Outcome
from .trial import Tally

CALLS = 25
"""Of one part, where there are as many parts as processes; a process is busy with it for seconds."""
GRACE = 60.0
"""Seconds beyond the limit after which a process is taken to hang: a part ends with the call that it is at."""

LEAVE = 5.0
"""Seconds that a process without a part has to end."""


class Part(NamedTuple):
    """What one process does at a time: every `of`-th round of a check, from the `number`-th."""

    check: str
    seed: int
    number: int
    of: int


Drawn = tuple[Outcome, Tally]


def parts_of(check: str, seed: int, calls: int | None, jobs: int) -> list[Part]:
    """calls: how many a check draws; None for one that draws nothing, which is not parted."""
    of = 1 if calls is None else min(jobs, -(-calls // CALLS))
    return [Part(check, seed, number, of) for number in range(of)]


def run_parts(
    parts: Sequence[Part], work: Callable[[], Callable[[Part], Drawn]], jobs: int, device: str, until: float | None
) -> Iterator[tuple[Part, Drawn]]:
    """Each part with what came of it, in the order in which they end. Once a check has failed its other parts are left out.

    work: picklable; called once in each process, it returns what runs a part. until: of `time.time`; nothing begins after it.
    """
    left = deque(sorted(parts, key=lambda part: part.number))  # the first part of every check first
    workers: list[_Worker] = []
    try:
        while left or any(worker.part for worker in workers):
            if until is not None and time.time() > until:
                yield from ((part, (Outcome(part.check, "skipped", 0, 0, part.seed, 0.0, OUT_OF_TIME), Tally())) for part in left)
                left.clear()
            workers = [worker for worker in workers if not worker.ended]
            for worker in workers:
                if worker.part is None and left:
                    worker.begin(left.popleft())
            while left and len(workers) < jobs:
                workers.append(_Worker(work, jobs, device))
                workers[-1].begin(left.popleft())
            patience = None if until is None else max(until + GRACE - time.time(), 0.0)
            answering = wait([worker.connection for worker in workers if worker.part], patience)
            for worker in workers:
                if worker.part is None or (answering and worker.connection not in answering):
                    continue
                part = worker.part
                drawn = worker.result() if answering else worker.killed(f"no end {GRACE:.0f} s after the time was up")
                if drawn[0].result == "failed":
                    left = deque(other for other in left if other.check != part.check)
                yield part, drawn
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    """A process that runs one part after the other."""

    def __init__(self, work: Callable[[], Callable[[Part], Drawn]], jobs: int, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, work, jobs, device))
        self.process.start()
        theirs.close()
        self.part: Part | None = None
        self.ended = False

    def begin(self, part: Part) -> None:
        self.part, self.since = part, time.time()
        with contextlib.suppress(OSError):  # if it has died, `result` says so
            self.connection.send(part)

    def result(self) -> Drawn:
        try:
            drawn, usable = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(10)
            return self.killed(f"its process ended with exit code {self.process.exitcode}")
        self.part, self.ended = None, not usable
        if self.ended:
            self.stop()
        return drawn

    def killed(self, why: str) -> Drawn:
        self.stop()
        part, self.part, self.ended = self.part, None, True
        text = f"{part.check}: {why}; it was at part {part.number + 1} of {part.of}"
        return Outcome(part.check, "failed", 0, 0, part.seed, time.time() - self.since, text), Tally()

    def stop(self) -> None:
        self.connection.close()
        if self.part is None:
            self.process.join(LEAVE)  # it ends by itself, and takes along what it shares with others
        self.process.kill()
        self.process.join()


def _serve(connection: Connection, work: Callable[[], Callable[[Part], Drawn]], jobs: int, device: str) -> None:
    torch.set_num_threads(max((os.cpu_count() or 1) // jobs, 1))
    run = work()
    while True:
        try:
            part = connection.recv()
        except EOFError:
            return
        try:
            drawn = run(part)
        except Exception:
            drawn = Outcome(part.check, "failed", 0, 0, part.seed, 0.0, f"{part.check}: {traceback.format_exc()}"), Tally()
        connection.send((drawn, drawn[0].result != "failed" or _usable(device)))


def _usable(device: str) -> bool:
    """Whether the device still answers: after a misaligned address, say, every later call of this process would fail."""
    try:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
