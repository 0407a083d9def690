"""plan.export without kernels: the forms that stored parameters have."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
import quant_numerics as qn
from hijax_trace import Carrier
from jaxtap_testkit.store_samples import quantized

D = 32
QTYPES = ["int3", "int4", "int8", "nf4", "float8_e4m3fn", "mxfp4", "nvfp4"]


def model(params, x):
    masked = params["w"] * params["mask"]
    return jnp.tanh(x @ params["v"]) @ masked


def draw(*shape):
    return jnp.asarray(np.random.default_rng(shape[0]).normal(size=shape) / 6, jnp.float32)


PARAMS = {"v": draw(D, D), "w": draw(D, D), "mask": jnp.tri(D)}
X = draw(5, D)


def reloaded(program):
    return xla.load_exported(program.serialize())


@pytest.mark.slow
@pytest.mark.parametrize("qtype", QTYPES)
def test_arguments_in_every_format(qtype):
    stored = quantized(qtype, (2, 32, 6))
    ones = jax.tree.map(jnp.ones_like, stored)

    def fn(q, x):
        return x @ qn.dequantize(q)[0], q

    exported = jax.export.export(jax.jit(fn))(stored, X)
    again = jax.export.deserialize(bytearray(exported.serialize()))
    assert again.in_tree == exported.in_tree
    assert again.out_tree == exported.out_tree
    found, q = again.call(ones, X)
    np.testing.assert_array_equal(found, jax.jit(fn)(ones, X)[0])
    assert (q.qtype, q.dtype, q.shape) == (qtype, stored.dtype, stored.shape)


def test_a_carrier_of_another_program():
    carrier = Carrier(X, {}, (), lambda path: True, X.shape, X.dtype)
    exported = jax.export.export(jax.jit(lambda c: c.own + 1))(carrier)
    with pytest.raises(xla.QuantizationError, match=r"must be one that plan.quantize returned"):
        exported.serialize()


@jax.tree_util.register_pytree_node_class
class Module:
    """A node that jax.export doesn't know."""

    def __init__(self, w):
        self.w = w

    def tree_flatten(self):
        return (self.w,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_nodes_that_cannot_be_written():
    def fn(module, x):
        return x @ module.w

    module = Module(draw(D, D))
    plan = xla.PtqProvider(xla.QuantizationRule(weight_qtype="int8")).plan(fn, module, X)
    stored = plan.quantize(module)
    with pytest.raises(
        xla.StoreError, match=r"must be trees that jax.export can write.*inside=True"
    ):
        plan.export(stored, X).serialize()
    again = reloaded(plan.export(stored, X, inside=True))
    np.testing.assert_array_equal(again(X), jax.jit(plan.apply(fn))(stored, X))


@pytest.mark.slow
def test_ranges_are_a_part_of_the_program():
    rule = xla.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    plan = xla.PtqProvider(rule).plan(model, PARAMS, X)
    ranges = plan.calibrate(PARAMS, [(X,)])
    stored = plan.quantize(PARAMS)
    again = reloaded(plan.export(stored, X, statistics=ranges))
    wanted = jax.jit(plan.apply(model, ranges))(stored, X)
    np.testing.assert_allclose(again(stored, X), wanted, atol=1e-6)
