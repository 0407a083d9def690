"""Layers of Linen that are scanned, rematerialized or not: planned, trained and exported."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_odml as odml
from jaxtap_testkit.numbers import normal

RULES = [odml.OdmlRule(weight_qtype="int8", output_qtype="int8")]
X = np.asarray(normal(16, 8, seed=1))
Y = np.tanh(X[:, ::-1])


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = jax.nn.relu(nn.Dense(16, name="up")(x))
        return jnp.tanh(x + nn.Dense(8, name="down")(h)), None


class Stack(nn.Module):
    remat: bool

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        layers = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return layers(name="layers")(x, None)[0]


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_scanned_layers(remat):
    model = Stack(remat)
    given = jax.jit(model.init)(jax.random.key(0), X)
    quantized = odml.qat(model.apply, RULES)
    plan = quantized.plan(given, X)
    matmuls = [op_id for op_id in plan.decisions if "dot_general" in op_id]
    assert matmuls == [f"Stack/layers/{n}/scan(body_fn)/dot_general:0" for n in ("up", "down")]

    stats = quantized.calibrate(given, [(X,)])

    @jax.jit
    def step(params):
        def loss(params):
            return jnp.mean((quantized(params, X, quant_stats=stats) - Y) ** 2)

        loss, slope = jax.value_and_grad(loss)(params)
        return loss, jax.tree.map(lambda p, g: p - 0.2 * g, params, slope)

    losses, trained = [], given
    for _ in range(20):
        loss, trained = step(trained)
        losses.append(float(loss))
    float_loss = float(jnp.mean((model.apply(given, X) - Y) ** 2))
    assert losses[0] == pytest.approx(float_loss, rel=0.1)
    assert losses[-1] < 0.7 * losses[0]

    artifact = odml.export(model.apply, trained, stats, RULES, X)
    (actual,) = artifact.run(input_0=X).values()
    expected = quantized(trained, X, quant_stats=stats.with_state(stats.state))
    np.testing.assert_allclose(actual, expected, atol=3 * artifact.report.sites[-1].scale)
