"""Granularity: which elements of a parameter may share a scale, against brute force."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provider_xla.plan.weight import Granularity, of_operand
from quant_numerics import contraction_tiles


@pytest.mark.parametrize(
    ("axes", "shape", "operand", "contracted", "tile", "channels", "tiles"),
    [
        ((0, 1), (8, 6), (8, 6), (0,), None, (1,), {}),
        ((1, 0), (6, 8), (8, 6), (0,), None, (0,), {}),
        ((0, 1), (8, 6), (8, 6), (0,), 4, (1,), {0: 4}),
        ((0, 1), (8, 6), (8, 6), (0,), 8, (1,), {0: 8}),
        ((None, 0, 1), (3, 8, 6), (8, 6), (0,), None, (0, 2), {}),
        ((0, (1, 2)), (8, 12), (8, 3, 4), (0,), None, (1,), {}),
        ((0, (1, 2)), (8, 12), (8, 3, 4), (2,), None, (0,), {1: 4}),
        ((0, (1, 2)), (8, 12), (8, 3, 4), (1,), None, (0,), {}),
        ((0, (1, 2)), (8, 12), (8, 3, 4), (1, 2), 2, (0,), {1: 2}),
        ((0, 0, 1), (2, 4, 6), (8, 6), (0,), None, (2,), {}),
        ((0, 0, 1), (2, 4, 6), (8, 6), (0,), 2, (0, 2), {1: 2}),
        ((0, 0, 1), (2, 4, 6), (8, 6), (0,), 4, (0, 2), {1: 4}),
        ((0, 0, 1), (4, 4, 6), (16, 6), (0,), 8, (2,), {0: 2, 1: 4}),
        ((0, 0, 1), (2, 4, 6), (8, 6), (1,), None, (0, 1), {}),
        ((0, 1), (72, 6), (72, 6), (0,), 32, (1,), {0: 32}),
        ((0, 1, 2), (4, 8, 6), (4, 8, 6), (0, 1), 16, (2,), {0: 2}),
        ((0, 1, 2), (4, 8, 6), (4, 8, 6), (0, 1), 4, (0, 2), {1: 4}),
        ((0, 1, 2), (4, 8, 6), (4, 8, 6), (1, 0), 8, (2,), {1: 2}),
        (((0, 1), 2), (32, 6), (4, 8, 6), (0, 1), 16, (1,), {0: 16}),
        (((0, 1), 2), (32, 6), (4, 8, 6), (0, 1), 4, (1,), {0: 4}),
        (((0, 1), 2), (32, 6), (4, 8, 6), (1, 0), 8, (1,), {}),
    ],
)
def test_moves(axes, shape, operand, contracted, tile, channels, tiles):
    tiles_of = {} if tile is None else contraction_tiles(operand, contracted, tile)
    found = of_operand(axes, shape, operand, contracted, tiles_of)
    assert found == Granularity(channels, tiles)


def slices(granularity, shape):
    """For each element, the number of its slice."""
    counts = granularity.scale_shape(shape)
    per_axis = [np.arange(n) // (n // c) for n, c in zip(shape, counts, strict=True)]
    grid = np.meshgrid(*per_axis, indexing="ij")
    return np.ravel_multi_index(grid, counts)


@st.composite
def operands(draw):
    """A parameter, one reshape and transpose of it, and axes that are contracted."""
    sizes = draw(st.lists(st.sampled_from([2, 3, 4]), min_size=2, max_size=4))
    cuts = sorted(draw(st.sets(st.integers(1, len(sizes) - 1))))
    groups = [sizes[a:b] for a, b in zip([0, *cuts], [*cuts, len(sizes)], strict=True)]
    merged = [math.prod(group) for group in groups]
    split = draw(st.booleans())
    shape, moved = (merged, sizes) if split else (sizes, merged)
    order = draw(st.permutations(range(len(moved))))
    positions, axes = iter(range(len(sizes))), []
    for number, group in enumerate(groups):
        parts = [next(positions) for _ in group]
        if split:
            became = tuple(order.index(p) for p in parts)
            axes.append(became if len(parts) > 1 else became[0])
        else:
            axes += [order.index(number)] * len(group)
    operand = tuple(moved[a] for a in order)
    contracted = draw(st.sets(st.integers(0, len(operand) - 1), min_size=1))
    return tuple(shape), tuple(moved), tuple(order), tuple(axes), operand, sorted(contracted)


@pytest.mark.slow
@settings(max_examples=200)
@given(operands())
def test_no_two_scales_in_what_is_summed(case):
    """Along contracted axes a scale never changes, but where tiles say so."""
    shape, moved, order, axes, operand, contracted = case
    found = of_operand(axes, shape, operand, contracted, {})
    number = slices(found, shape).reshape(moved).transpose(order)
    assert number.shape == operand
    first = number[
        tuple(slice(0, 1) if a in contracted else slice(None) for a in range(len(operand)))
    ]
    np.testing.assert_array_equal(number, np.broadcast_to(first, operand))


@pytest.mark.slow
@settings(max_examples=200)
@given(operands(), operands())
def test_join_is_coarser_than_both(one, other):
    shape = one[0]
    first = of_operand(one[3], shape, one[4], one[5], {})
    second = Granularity(tuple(range(len(shape)))[: len(other[5])])
    both = first.join(second)
    for finer in (first, second):
        pairs = set(zip(slices(finer, shape).ravel(), slices(both, shape).ravel(), strict=True))
        assert len(pairs) == len({a for a, _ in pairs})
    assert first.join(first).scale_shape(shape) == first.scale_shape(shape)
    assert both.scale_shape(shape) == second.join(first).scale_shape(shape)
