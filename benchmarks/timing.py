"""Times on a CUDA card: medians of event-timed repeats, interleaved, so that a warm or a busy card meets every candidate alike; and of calls
that the host makes one after the other."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch


def warmed(function: Callable[[], object], seconds: float = 60.0) -> float:
    """Runs once, compilation included, then once more; the second run's milliseconds."""
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    if time.perf_counter() - start > seconds:
        raise TimeoutError(f"its first run took {time.perf_counter() - start:.0f} s")
    return _once(function)


def interleaved(functions: Mapping[str, Callable[[], object]], seconds: float = 0.4, most: int = 40, least: int = 5) -> dict[str, float]:
    """Median milliseconds of each function. `seconds` bounds what all of them take together, beyond the least number of rounds."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    start, drawn = time.perf_counter(), random.Random(0)
    for turn in range(most):
        if turn >= least and time.perf_counter() - start > seconds:
            break
        # In another order each time: what one leaves behind, cold caches say, would meet the same one again and again.
        for name in drawn.sample(list(functions), len(functions)):
            times[name].append(_once(functions[name]))
    return {name: statistics.median(each) for name, each in times.items()}


def chained(functions: Mapping[str, Callable[[], object]], rounds: int = 4, repeats: int = 25) -> dict[str, float]:
    """Milliseconds a call, of calls made one after the other as a decoder makes them: the host's time where it is the longer. The best of
    a few rounds taken in turns, since what else a host does only adds to it."""
    times = {name: float("inf") for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                function()
            torch.cuda.synchronize()
            times[name] = min(times[name], (time.perf_counter() - start) / repeats * 1e3)
    return times


_BUSY = (3_000_000, 12_000_000)
"""Clock cycles of the card, 1.5 and 6 ms: the second where the host took longer than the first."""


def _once(function: Callable[[], object]) -> float:
    """Milliseconds on the card. The card is kept busy while the host enqueues the call, so that the host's time is not in it, except that of
    a call which waits for the card itself or takes the host longer than the longest wait."""
    for cycles in _BUSY:
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(cycles)
        before.record()
        function()
        after.record()
        all_enqueued_in_time = not before.query()
        after.synchronize()
        if all_enqueued_in_time:
            break
    return before.elapsed_time(after)
