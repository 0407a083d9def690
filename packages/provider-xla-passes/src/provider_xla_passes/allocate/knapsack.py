"""Choose an option per item: least total cost within a size budget.

The multiple-choice knapsack problem (Sinha and Zoltners 1979, "The Multiple-Choice Knapsack
Problem"), solved by HiGHS. Sizes are integers and hold exactly; costs are floats.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

Sizes = Sequence[Sequence[int]]
Costs = Sequence[Sequence[float]]
Choice = list[int]

# HiGHS stops within 1e-6 of the best: a millionth of a millionth of the costs' spread.
_SPREAD = 1e6

_ATTEMPTS = 20
"""How often HiGHS is asked again for sizes that fit to the byte."""


def choose(sizes: Sizes, costs: Costs, budget: int) -> Choice | None:
    """Return the number of each item's option of least total cost; None if none fits the budget."""
    kept = [_useful(*item) for item in zip(sizes, costs, strict=True)]
    # By item, from the smallest and dearest option to the largest and cheapest one.
    extra = [[int(s[j]) - int(s[options[0]]) for j in options] for s, options in _zip(sizes, kept)]
    excess = [[c[j] - c[options[-1]] for j in options] for c, options in _zip(costs, kept)]
    room = budget - sum(int(s[options[0]]) for s, options in _zip(sizes, kept))
    if room < 0:
        return None
    places = _greedy(extra, excess, room)
    bound = math.fsum(row[j] for row, j in _zip(excess, places))
    if bound > 0:
        better = _exact(extra, excess, room, bound)
        if better is not None and math.fsum(row[j] for row, j in _zip(excess, better)) < bound:
            places = better
    return [options[j] for options, j in _zip(kept, places)]


def _useful(sizes: Sequence[int], costs: Sequence[float]) -> list[int]:
    """Return the options that no smaller or equal one beats in cost."""
    kept: list[int] = []
    for j in sorted(range(len(sizes)), key=lambda j: (sizes[j], costs[j])):
        if not kept or costs[j] < costs[kept[-1]]:
            kept.append(j)
    return kept


def _greedy(extra: Sizes, excess: Costs, room: int) -> Choice:
    """Return a choice that fits, from the steepest steps of the convex hulls."""
    # Begin with the smallest options. Steps to larger ones are taken in the order of the cost that
    # they save per byte, as long as they fit.
    steps = []
    for i, (row, costs) in enumerate(_zip(extra, excess)):
        at = 0
        while at < len(row) - 1:
            saved = [(costs[at] - costs[j]) / (row[j] - row[at]) for j in range(at + 1, len(row))]
            to = at + 1 + int(np.argmax(saved))
            steps.append((-max(saved), i, at, to))
            at = to
    places = [0] * len(extra)
    for _, i, at, to in sorted(steps):
        grown = extra[i][to] - extra[i][at]
        if places[i] == at and grown <= room:
            places[i], room = to, room - grown
    return places


def _exact(extra: Sizes, excess: Costs, room: int, bound: float) -> Choice | None:
    """Return the best choice among those that cost at most ``bound``."""
    # Any other option would make the choice larger than the budget, or dearer than the known one.
    options = [
        (i, j)
        for i, row in enumerate(extra)
        for j in range(len(row))
        if excess[i][j] <= bound and row[j] <= room
    ]
    numbers = np.arange(len(options))
    items = np.array([i for i, _ in options])
    cost = np.array([excess[i][j] for i, j in options]) * (_SPREAD / bound)
    each = csr_array((np.ones(len(options)), (items, numbers)), shape=(len(extra), len(options)))
    # In units of the sizes' common divisor, sizes are whole numbers.
    unit = math.gcd(*(extra[i][j] for i, j in options)) or 1
    most = room // unit + 0.5
    size = np.array([[extra[i][j] // unit for i, j in options]]) / most
    limits = [LinearConstraint(each, 1, 1)]
    for attempt in itertools.count():
        # HiGHS lets sums exceed limits by a millionth. If that keeps happening, lower the limit.
        fits = LinearConstraint(size, -np.inf, 1 if attempt < _ATTEMPTS else 1 - 2e-6)
        found = milp(
            cost,
            integrality=np.ones(len(options)),
            bounds=Bounds(0, 1),
            constraints=[*limits, fits],
            options={"mip_rel_gap": 0},
        )
        if found.x is None or attempt > _ATTEMPTS:
            return None
        taken = [option for option, x in zip(options, found.x, strict=True) if x > 0.5]
        if sum(extra[i][j] for i, j in taken) <= room:
            return [j for _, j in sorted(taken)]
        # Exclude this choice, and look for another.
        limits.append(LinearConstraint((found.x > 0.5)[None].astype(float), 0, len(taken) - 1))
    raise AssertionError("unreachable")


def _zip(*columns: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    return zip(*columns, strict=True)
