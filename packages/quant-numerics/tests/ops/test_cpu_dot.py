"""Layouts of integer contractions in which XLA's CPU backend is slow."""

import functools

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import quant_numerics as qn
from jaxtap_testkit.meshes import line
from quant_numerics.ops import cpu_dot
from quant_numerics.ops.cpu_dot import int_dot_general

# Shapes, and what is contracted and what is a batch in each.
SLOW = {
    "both first": ((300, 130), (300, 70), (((0,), (0,)), ((), ()))),
    "first and last": ((300, 130), (70, 300), (((0,), (1,)), ((), ()))),
    "two axes": ((4, 50, 130), (4, 50, 90), (((0, 1), (0, 1)), ((), ()))),
    "two axes in another order": ((33, 5, 65, 7), (65, 40, 33), (((2, 0), (0, 2)), ((), ()))),
    "a batch": ((4, 200, 70), (4, 200, 90), (((1,), (1,)), ((0,), (0,)))),
    "a batch inside": ((200, 3, 70), (90, 3, 200), (((0,), (2,)), ((1,), (1,)))),
    "a few rows": ((8, 1100), (8, 500), (((0,), (0,)), ((), ()))),
    "an axis of one": ((300, 130, 1), (300, 70), (((0,), (0,)), ((), ()))),
}
FAST = {
    "last and first": ((130, 300), (300, 70), (((1,), (0,)), ((), ()))),
    "both last": ((130, 300), (70, 300), (((1,), (1,)), ((), ()))),
    "small": ((30, 40), (30, 50), (((0,), (0,)), ((), ()))),
    "few columns": ((3000, 130), (3000, 7), (((0,), (0,)), ((), ()))),
    "fewer rows": ((7, 1100), (7, 500), (((0,), (0,)), ((), ()))),
    "nothing contracted": ((1100,), (1100,), (((), ()), ((), ()))),
    "empty": ((0, 130), (0, 70), (((0,), (0,)), ((), ()))),
}


@pytest.fixture
def one_device(monkeypatch):
    """Arrays of tests are on one of eight devices: XLA cuts nothing."""
    monkeypatch.setattr(cpu_dot, "may_be_cut", lambda: False)


def problem(shapes, dtype=np.int8):
    rng = np.random.default_rng(0)
    return [rng.integers(-127, 128, shape).astype(dtype) for shape in shapes]


def exact(a, b, dims):
    """The sums are exact in float64."""
    found = lax.dot_general(*(x.astype(np.float32) for x in (a, b)), dims, precision="highest")
    assert np.abs(np.asarray(found)).max(initial=0) < 2**24
    return found


@pytest.mark.sample(2)
@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("name", SLOW)
def test_slow_layouts(name):
    left, right, dims = SLOW[name]
    a, b = problem((left, right))
    dot = functools.partial(int_dot_general, dimension_numbers=dims)
    wanted = exact(a, b, dims)
    both = np.stack([a, a[::-1]])
    found, mapped = jax.jit(lambda a, b, both: (dot(a, b), jax.vmap(dot, (0, None))(both, b)))(
        a, b, both
    )
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(mapped, [wanted, exact(both[1], b, dims)])
    traced = jax.jit(dot).trace(a, b)
    assert "while" in traced.lower().as_text()
    elsewhere = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "while" not in elsewhere
    assert "transpose" not in elsewhere


@pytest.mark.usefixtures("one_device")
def test_other_layouts_are_left():
    for name, (left, right, dims) in FAST.items():
        a, b = problem((left, right))
        traced = jax.jit(functools.partial(int_dot_general, dimension_numbers=dims)).lower(a, b)
        plain = functools.partial(lax.dot_general, dimension_numbers=dims)
        wanted = jax.jit(functools.partial(plain, preferred_element_type=np.int32)).lower(a, b)
        assert traced.as_text() == wanted.as_text().replace(
            "jit_dot_general", "jit_int_dot_general"
        ), name
    left, right, dims = SLOW["both first"]
    a, b = problem((left, right), np.int32)
    assert "while" not in jax.jit(lambda a, b: int_dot_general(a, b, dims)).lower(a, b).as_text()


def test_what_xla_may_cut_is_left():
    """It would gather the operand of the loop: each device has its rows of a batch."""
    left, right, dims = SLOW["both first"]
    a, b = problem((left, right))
    dot = functools.partial(int_dot_general, dimension_numbers=dims)
    assert "while" not in jax.jit(dot).lower(a, b).as_text()
    wide = np.concatenate([a] * 2)

    def own(a, b):
        return lax.psum(dot(a, b), "d")

    mapped = jax.shard_map(own, mesh=line(size=2), in_specs=(P("d"), P()), out_specs=P())
    assert "while" in jax.jit(mapped).lower(wide, b).as_text()
    np.testing.assert_array_equal(jax.jit(mapped)(wide, b), 2 * exact(a, b, dims))


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_gradients_of_weights(monkeypatch):
    """A quantized einsum as in a backward pass, without its kernel, beside float64."""
    monkeypatch.setattr(cpu_dot, "_KERNEL_PRODUCTS", float("inf"))
    x, y = np.random.default_rng(1).normal(size=(2, 4, 60, 96)).astype(np.float32)
    x, y = qn.quantize(x, "int8", channel_axes=(2,)), qn.quantize(y, "int8")
    einsum = jax.jit(lambda x, y: qn.einsum("bsi,bso->io", x, y))
    wanted = np.einsum("bsi,bso->io", *(np.asarray(qn.dequantize(q), np.float64) for q in (x, y)))
    np.testing.assert_allclose(einsum(x, y), wanted, rtol=1e-4, atol=1e-4)
    assert "while" in einsum.lower(x, y).as_text()
