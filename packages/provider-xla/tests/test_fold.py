"""Tables of programs with hundreds of layers: equal layers share a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
from provider_xla.tables import fold_lines, fold_rows, folded


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([f"layer_{i}/dot:0" for i in range(80)], "layer_[0-79]/dot:0"),
        ([f"dot:{2 * i}" for i in range(5)], "dot:[0-8:2]"),
        (["p[3]['up']", "p[1]['up']", "p[2]['up']"], "p[1-3]['up']"),
        ([f"dot:{i}" for i in (1, 2, 4)], "dot:[1,2,4]"),
        ([f"dot:{i * i}" for i in range(9)], "dot:[0,1,4,9,...,64]"),
        ([f"b{i}/l{k}" for i in range(2) for k in range(3)], "b[0-1]/l[0-2]"),
        (["layer_1", "layer_01"], "layer_[1,1]"),
        (["conv2d"], "conv2d"),
    ],
)
def test_numbers_that_differ_are_said_together(names, expected):
    (one,) = folded([(name,) for name in names])
    assert one.texts == (expected,)
    assert one.rows == tuple(range(len(names)))


def test_rows_that_differ_stay_apart():
    rows = [[f"l{i}/dot:0", "int8" if i else "float", f"w{i}"] for i in range(100)]
    assert fold_rows(rows, (0, 2)) == [
        ["l0/dot:0", "float", "w0"],
        ["l[1-99]/dot:0", "int8", "w[1-99]"],
    ]
    assert fold_rows(rows[:50], (0, 2)) == rows[:50]
    lines = [*(f"l{i}: float" for i in range(30)), "other"]
    assert fold_lines(lines) == ["l[0-29]: float (30 times)", "other"]
    assert fold_lines(lines[-10:]) == lines[-10:]


COUNT = 31  # of two quantized operations each: a table of 60 rows or more is folded


def model(params, x):
    for i, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ layer["up"]) @ layer["down"] * layer["scale"]
            x = x @ layer["skip"]
    return x


@pytest.fixture(scope="module")
def planned():
    rng = np.random.default_rng(0)

    def weight():
        return jnp.asarray(rng.standard_normal((8, 8)) / 3, jnp.float32)

    names = ("up", "down", "skip")
    layers = [{n: weight() for n in names} | {"scale": jnp.ones(8)} for _ in range(COUNT)]
    params = {"layers": layers}
    x = jnp.ones((2, 8))
    rules = [
        xla.QuantizationRule(weight_path=r".*'skip'.*"),
        xla.QuantizationRule(weight_qtype="int8"),
    ]
    return xla.PtqProvider(rules).plan(model, params, x, kernels=False), params, x


def test_a_plan_of_many_layers(planned):
    plan, _, _ = planned
    text = str(plan)
    assert f"layer_[0-{COUNT - 1}]/matmul:0" in text
    assert f"args[0]['layers'][0-{COUNT - 1}]['up']" in text
    assert len(text.splitlines()) < 15, text
    assert len(plan.ops.table(fold=False).splitlines()) > 3 * COUNT
    (kept,) = {why for path, _, why in plan.floats if "scale" in path}
    assert kept == "no matmul, convolution or gather uses it"
    whys = [why for path, _, why in plan.floats if "skip" in path]
    assert len(set(whys)) == COUNT
