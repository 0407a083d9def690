"""Contractions without their operands."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quant_numerics as qn
from jaxtap_testkit.qarray_samples import normal

INT8 = qn.HowToQuantize("int8")
NHWC = lax.conv_dimension_numbers((2, 6, 6, 8), (1, 1, 8, 4), ("NHWC", "HWIO", "NHWC"))
MATMUL = qn.Matmul((((1,), (0,)), ((), ())))
CONV = qn.Convolution(NHWC, (1, 1), "VALID")
GROUPS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def test_equal_ones_are_equal():
    lists = qn.Convolution(NHWC, [1, 1], [[0, 1]] * 2, np.array([1, 1]), precision=["high"] * 2)
    tuples = qn.Convolution(NHWC, (1, 1), ((0, 1),) * 2, (1, 1), precision=("high",) * 2)
    assert lists == tuples
    assert hash(lists) == hash(tuples)
    assert isinstance(lists.numbers, lax.ConvDimensionNumbers)
    given = dataclasses.replace(MATMUL, preferred_element_type=jnp.float32)
    assert given.preferred_element_type == np.dtype("float32")
    assert len({given, MATMUL, dataclasses.replace(given, precision="high")}) == 3
    assert qn.RaggedMatmul() == qn.RaggedMatmul(
        lax.RaggedDotDimensionNumbers((((1,), [1]), ((), [])), [0], [0])
    )
    with pytest.raises(TypeError, match="preferred_element_type must have one of the dtypes"):
        qn.Matmul(MATMUL.dims, preferred_element_type=jnp.int32)


def test_labels_are_those_of_an_einsum():
    assert qn.Matmul((((1,), (0,)), ((), ())), "...ab,bc->...ca").labels(2, 2) == ("ab", "bc", "ca")
    x, w = normal(2, 3, 4, 5), normal(4, 6, 2, 5, seed=1)
    contraction = qn.Matmul((((2,), (0,)), ((3, 0), (3, 2))))
    left, right, out = contraction.labels(x.ndim, w.ndim)
    expected = np.einsum(f"{left},{right}->{out}", x, w)
    np.testing.assert_allclose(contraction.run(x, w), expected, rtol=1e-5, atol=1e-5)


def test_scales_that_fit():
    assert MATMUL.takes_scales(1, (8, 4), (1, 4))
    assert MATMUL.takes_scales(1, (8, 4), (2, 1))
    assert not MATMUL.takes_scales(1, (8, 4), (8, 1))  # a contraction for each row
    assert CONV.takes_scales(1, (1, 1, 8, 4), (1, 1, 2, 4))
    assert not CONV.takes_scales(1, (3, 3, 8, 4), (1, 1, 2, 4))
    assert not CONV.takes_scales(0, (2, 6, 6, 8), (2, 1, 1, 2))


def test_sizes_that_tiles_divide():
    tiled = qn.HowToQuantize("int4", 4)
    assert MATMUL.tiled_sizes([(3, 8), (8, 4)], (None, tiled)) == (8,)
    assert MATMUL.tiled_sizes([(3, 1), (8, 4)], (None, tiled)) == ()  # an einsum broadcasts
    window = [(2, 6, 6, 8), (3, 3, 8, 4)]
    assert CONV.tiled_sizes(window, (None, tiled)) == (3, 3, 8)
    assert CONV.tiled_sizes(window, (INT8, tiled)) == ()
    assert CONV.tiled_sizes([window[0], (1, 1, 8, 4)], (INT8, tiled)) == (1, 1, 8)
    assert (CONV.sparse_axis(1, 4), MATMUL.sparse_axis(1, 2)) == (2, 0)


@pytest.mark.parametrize(
    ("contraction", "shapes", "extras"),
    [
        (MATMUL, ((3, 8), (8, 4)), ()),
        (qn.Matmul(MATMUL.dims, "ab,bc->ca"), ((3, 8), (8, 4)), ()),
        (CONV, ((2, 6, 6, 8), (1, 1, 8, 4)), ()),
        (qn.RaggedMatmul(), ((5, 8), (2, 8, 4)), (np.array([2, 3]),)),
    ],
    ids=["dot_general", "einsum", "convolution", "ragged"],
)
def test_training_has_the_value_of_quantizing_first(contraction, shapes, extras):
    operands = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    hows = (INT8, qn.HowToQuantize("int4", 4))

    def run(*operands):
        return contraction.run(*map(contraction.quantize, (0, 1), operands, hows), *extras)

    def train(*operands):
        return contraction.train(*operands, *extras, lhs_how=hows[0], rhs_how=hows[1])

    np.testing.assert_array_equal(jax.jit(train)(*operands), jax.jit(run)(*operands))


def test_a_ragged_matmul_of_other_axes_does_not_train():
    other = qn.RaggedMatmul(GROUPS)
    assert not other.trains
    x = jnp.ones((5, 3))
    with pytest.raises(ValueError, match="contraction that trains"):
        other.train(x, x, np.array([2, 3]), lhs_how=INT8, rhs_how=INT8)
