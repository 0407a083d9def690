"""The choice beside all choices."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from provider_xla_passes.allocate.knapsack import choose

ITEM = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.one_of(st.integers(0, 9).map(float), st.floats(1e-9, 1e3)),
    ),
    min_size=1,
    max_size=4,
)


def best(sizes, costs, budget):
    found = math.inf
    for places in itertools.product(*[range(len(row)) for row in sizes]):
        if sum(row[j] for row, j in zip(sizes, places, strict=True)) <= budget:
            cost = math.fsum(row[j] for row, j in zip(costs, places, strict=True))
            found = min(found, cost)
    return found


@settings(max_examples=150)
@given(
    items=st.lists(ITEM, min_size=1, max_size=5),
    budget=st.integers(0, 160),
    scale=st.integers(1, 10**6),
)
@example(items=[[(3, 1.0), (4, 0.5)], [(3, 1.0), (4, 0.0)]], budget=7, scale=10**6)
@example(items=[[(0, 1e3), (1, 1e-9)]] * 5, budget=4, scale=1)
def test_no_choice_within_the_budget_costs_less(items, budget, scale):
    sizes = [[scale * size for size, _ in item] for item in items]
    costs = [[cost for _, cost in item] for item in items]
    expected = best(sizes, costs, scale * budget)
    found = choose(sizes, costs, scale * budget)
    if found is None:
        assert expected == math.inf
        return
    assert sum(row[j] for row, j in zip(sizes, found, strict=True)) <= scale * budget
    cost = math.fsum(row[j] for row, j in zip(costs, found, strict=True))
    assert cost == pytest.approx(expected, rel=1e-9, abs=1e-9 * max(map(max, costs)))


def test_a_byte_too_many_is_too_many():
    """HiGHS takes a sum that is a millionth more than the limit for one that is within."""
    sizes = [[0, 10**8 + 1], [0, 10**8]]
    costs = [[2.0, 0.0], [1.9, 0.0]]
    assert choose(sizes, costs, 10**8) == [0, 1]
    assert choose(sizes, costs, 10**8 + 1) == [1, 0]


def test_of_equal_costs_the_smallest():
    assert choose([[5, 3, 4]], [[0.0, 0.0, 0.0]], 10) == [1]


@pytest.mark.slow
def test_many_items():
    rng = np.random.default_rng(0)
    bits = np.array([2, 3, 4, 5, 6, 8])
    elements = rng.integers(1, 50, 300) * 4096
    sizes = (elements[:, None] * bits // 8).tolist()
    costs = rng.lognormal(0, 2, (300, 1)) * 4.0**-bits * rng.uniform(0.8, 1.25, (300, 6))
    budget = int(elements.sum() // 2)
    found = choose(sizes, costs.tolist(), budget)
    assert sum(row[j] for row, j in zip(sizes, found, strict=True)) <= budget
    cost = sum(row[j] for row, j in zip(costs, found, strict=True))
    # No choice costs less than the Lagrangian bound, with any price of a byte.
    prices = np.geomspace(1e-12, 1e-3, 2000)
    bounds = [(costs + p * np.array(sizes)).min(1).sum() - p * budget for p in prices]
    assert max(bounds) <= cost <= max(bounds) * 1.001
