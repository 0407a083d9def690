"""Rules that are found by measuring: for tensors of which a static range keeps too little."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_odml as odml
from jaxtap_testkit.odml_exports import normal
from provider_odml.train.noise import noise_to_signal

RULES = [odml.OdmlRule(weight_qtype="int8", output_qtype="int8")]
W, X = {"up": normal(8, 8), "down": normal(8, 4, seed=1)}, normal(16, 8, seed=2)


def net(p, x):
    with jax.named_scope("first"):
        h = x @ p["up"]
    return jnp.tanh(h) @ p["down"]


def error(rules, x):
    """Return the relative error of all rows but the first."""
    model = odml.qat(net, rules)
    stats = model.calibrate(W, [(x,)])
    found = model(W, x, quant_stats=stats, update_quant_stats=False)[1:]
    exact = net(W, x)[1:]
    return float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))


@pytest.mark.slow
def test_the_noise_is_that_of_the_median_row():
    exact, rounded = np.array(normal(9, 6)), np.array(normal(9, 6, seed=1))
    exact[3], rounded[3] = 0, 1  # a row of zeros
    kept = np.delete(np.arange(9), 3)
    x, y = exact[kept].astype(np.float64), rounded[kept].astype(np.float64)
    expected = np.median(((x - y) ** 2).sum(-1) / (x**2).sum(-1))
    np.testing.assert_allclose(noise_to_signal(exact, rounded), expected, rtol=1e-5)
    assert noise_to_signal(jnp.zeros(3), jnp.ones(3)) == 0
    np.testing.assert_allclose(noise_to_signal(jnp.float32(2), jnp.float32(1)), 0.25)


def test_one_row_of_outliers_takes_the_range_from_the_others():
    x = X.at[0].multiply(1000.0)
    model = odml.qat(net, RULES)
    rules = odml.refine(model, W, [(x,)])
    assert rules[-1:] == tuple(RULES)
    decisions = odml.qat(net, rules).plan(W, x).decisions
    runs = {d.node.op_id: str(rules[d.rule]) for d in decisions.values() if d.rule is not None}
    assert runs["first/dot_general:0"] == "W8A8 dynamic"
    assert runs["tanh:0"] == "float"
    assert runs["dot_general:0"] == "W8A8 static"
    assert "a static range leaves" in str(decisions["tanh:0"].reason)
    assert error(rules, x) < 0.03 < 0.3 < error(RULES, x)


@pytest.mark.slow
def test_rules_stay_as_they_are_where_ranges_are_good():
    assert odml.refine(odml.qat(net, RULES), W, [(X,), (2 * X,)]) == tuple(RULES)


def test_batches_must_be_some():
    with pytest.raises(odml.OdmlError, match="batches must have at least one tuple"):
        odml.refine(odml.qat(net, RULES), W, [])
