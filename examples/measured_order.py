"""An order of backends that the application measures, once, for the calls that it is going to make.

python examples/measured_order.py
"""

from __future__ import annotations

import time

import torch

import attnreg

LAYERS = {"*.local.*": {"causal": True, "window": (63, None)}, "*.global.*": {"causal": True}}
"""The kinds of layers of a model, by the pattern of their names, and what their calls ask for."""


def measured(query, key, value, rounds: int = 5, **options) -> dict[str, float]:
    """Seconds of each backend that can run the call, fastest first. Those of a rank below 0 are last resorts, and left out."""
    selection = attnreg.explain(query, key, value, **options)
    able = [name for name in (selection.chosen.name, *selection.able) if attnreg.backends()[name].rank(selection.spec) >= 0]
    seconds = dict.fromkeys(able, float("inf"))
    for _ in range(rounds + 1):  # the first round warms up; in turns, so that a busy moment harms all alike
        for name in able:
            start = time.perf_counter()
            attnreg.attention(query, key, value, backend=name, **options)
            if query.is_cuda:
                torch.cuda.synchronize()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return dict(sorted(seconds.items(), key=lambda item: item[1]))


def main(length: int = 256) -> dict[str, list[str]]:
    query, key, value = torch.randn(1, length, 8, 64), torch.randn(1, length, 2, 64), torch.randn(1, length, 2, 64)
    orders = {}
    for pattern, options in LAYERS.items():
        seconds = measured(query, key, value, **options)
        # "auto" last: calls of these layers that none of the measured ones can run go their usual way.
        orders[pattern] = [*seconds, "auto"]
        attnreg.use(orders[pattern], layers=pattern)
        print(pattern, {name: f"{1e3 * each:.2f} ms" for name, each in seconds.items()})
    selection = attnreg.explain(query, key, value, **LAYERS["*.local.*"], layer="model.3.local.attention")
    print(selection.chosen.name, "by", selection.source)
    return orders


if __name__ == "__main__":
    main()
