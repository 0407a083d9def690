"""Gptq(sequential=...): each part of a model is rounded for what the parts before it give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from provider_xla import Gptq, Hadamard, PtqProvider, QuantizationRule, SmoothQuant

RNG = np.random.default_rng(0)
WIDTH, DEPTH = 24, 3
MIX = RNG.normal(size=(WIDTH, WIDTH))
X = [(RNG.normal(size=(60, WIDTH)) @ MIX).astype(np.float32) for _ in range(2)]
BATCHES = [(x,) for x in X]
LAYERS = {
    name: (RNG.normal(size=(DEPTH, WIDTH, WIDTH)) * 1.5 / np.sqrt(WIDTH)).astype(np.float32)
    for name in ("up", "down")
}
RULE = QuantizationRule(weight_qtype="int3")


def one_layer(x, layer):
    return x + jnp.tanh(x @ layer["up"]) @ layer["down"]


def unrolled(params, x):
    for layer in params:
        x = one_layer(x, layer)
    return x


def scanned(params, x):
    return jax.lax.scan(lambda x, layer: (one_layer(x, layer), None), x, params)[0]


LIST = [{name: LAYERS[name][i] for name in LAYERS} for i in range(DEPTH)]


def optimized(fn, params, passes, rule=RULE):
    plan = PtqProvider(rule).plan(fn, params, *BATCHES[0])
    return plan, *plan.optimize(params, BATCHES, passes)


def restored(stored):
    return jax.tree.map(lambda one: one.restore(), stored, is_leaf=lambda x: hasattr(x, "restore"))


def test_each_is_rounded_for_what_those_before_give():
    stored = restored(optimized(unrolled, LIST[:1], [Gptq(sequential=2)])[1])
    # The same in separate runs, each on a model whose first matrices are what the last one gave.
    params = [dict(layer) for layer in LIST[:1]]
    for i, name in [(0, "up"), (0, "down")]:
        again = restored(optimized(unrolled, params, [Gptq()])[1])[i][name]
        np.testing.assert_array_equal(again, stored[i][name])
        params[i][name] = np.asarray(again)


@pytest.mark.parametrize("before", [Hadamard(block=8), SmoothQuant()], ids=["rotated", "scaled"])
def test_maps_are_found_in_the_float_model(before):
    # int16 changes nothing that the maps or the inputs of the second matrix could show.
    rules = [QuantizationRule(weight_path=".*up.*", weight_qtype="int16"), RULE]
    fn = lambda params, x: one_layer(x, params[0])  # noqa: E731
    stored = restored(optimized(fn, LIST[:1], [before, Gptq(sequential=2)], rules)[1])
    plain = restored(optimized(fn, LIST[:1], [before, Gptq()], rules)[1])
    same = np.isclose(stored[0]["down"], plain[0]["down"], atol=1e-5)
    assert same.mean() > 0.98


@pytest.mark.slow
def test_steps_of_a_loop_are_parts():
    apart = restored(optimized(unrolled, LIST, [Gptq(sequential=2 * DEPTH)])[1])
    stacked = restored(optimized(scanned, LAYERS, [Gptq(sequential=2 * DEPTH)])[1])
    for name in LAYERS:
        for i in range(DEPTH):
            np.testing.assert_allclose(stacked[name][i], apart[i][name], rtol=1e-6)


def test_once_is_the_float_model_and_the_report_stays():
    _, once, report = optimized(scanned, LAYERS, [Gptq(sequential=1)])
    _, plain, expected = optimized(scanned, LAYERS, [Gptq()])
    jax.tree.map(np.testing.assert_array_equal, restored(once), restored(plain))
    assert report.as_json() == expected.as_json()


@pytest.mark.slow
def test_parts_that_need_more_memory(monkeypatch):
    monkeypatch.setattr("provider_xla_passes.optimize.GRAM_BYTES", 4 * WIDTH**2)
    stored = optimized(unrolled, LIST[::-1], [Gptq(sequential=3)])[1]
    assert all(one.qtype == "int3" for layer in stored for one in layer.values())


@pytest.mark.slow
def test_weights_that_are_computed():
    def model(params, x):
        return one_layer(one_layer(x, {**params, "up": params["up"] * 0.5}), params)

    params = {name: LAYERS[name][0] for name in LAYERS}
    _, stored, report = optimized(model, params, [Gptq(sequential=4)])
    assert all(row.after["Gptq"] < row.rounded for row in report if row.rounded)
    assert stored["down"].qtype == "int3"


def test_a_number_out_of_range():
    with pytest.raises(ValueError, match=r"sequential must be 0 or more\. Got -1"):
        Gptq(sequential=-1)
