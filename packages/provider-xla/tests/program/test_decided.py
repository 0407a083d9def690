"""A plan holds for every program that it is applied to, or one error says where it does not."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtap_testkit.xla_samples import draw
from provider_xla import (
    PtqProvider,
    QuantizationError,
    QuantizationRule,
    QuantizationWarning,
    load,
    save,
)

W1, W2, X = draw((16, 16), (16, 16), (4, 16))
PARAMS = {"one": W1, "two": W2}
BOTH = QuantizationRule(weight_qtype="int8", act_qtype="int8")
IN_LAYER = QuantizationRule(module_path="layer.*", weight_qtype="int8", act_qtype="int8")


def rounded(x, axis):
    """An array rounded to int8 with a scale for each row or column, as float64."""
    x = np.asarray(x, np.float64)
    scale = np.abs(x).max(axis, keepdims=True) / 127
    return np.round(x / scale) * scale


def layers(params, x, scope="layer"):
    for name in ("one", "two"):
        with jax.named_scope(f"{scope}_{name}"):
            x = jnp.tanh(x @ params[name])
    return x


def expected(x):
    for w in (W1, W2):
        x = np.tanh(rounded(x, 1) @ rounded(w, 0))
    return x


def planned(rule=IN_LAYER, fn=layers, params=PARAMS, x=X):
    plan = PtqProvider(rule, strict=True).plan(fn, params, x)
    return plan, plan.quantize(params)


def check(found, x):
    np.testing.assert_allclose(found, expected(x), atol=1e-4)


def stacked(params, x):
    def step(x, w):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w), None

    return lax.scan(step, x, params["w"])[0]


def unrolled(params, x):
    for i in range(2):
        with jax.named_scope("layer"):
            x = jnp.tanh(x @ params["w"][i])
    return x


# Programs that are not the planned one, and do the same to its parameters.
SAME = {
    "the planned one": layers,
    "other scopes that no rule tells apart": lambda p, x: layers(p, x, "layer/of"),
    "an operation more, without a parameter of the plan": lambda p, x: (
        layers(p, x) + 0 * (x @ jnp.ones((16, 16))) + 0 * (x @ x.T).sum()
    ),
    "another function": lambda p, x: jnp.einsum(
        "bi,io->bo", jnp.tanh(jnp.dot(x, p["one"])), p["two"]
    ),
    "a jitted function for both": lambda p, x: (
        (layer := jax.jit(lambda x, w: jnp.tanh(x @ w)))(layer(x, p["one"]), p["two"])
    ),
    "remat": lambda p, x: jax.checkpoint(layers)(p, x),
    "vmap inside": lambda p, x: jax.vmap(lambda row: layers(p, row))(x),
    "in a loop": lambda p, x: lax.fori_loop(0, 1, lambda i, x: layers(p, x), x),
    "a derivative inside": lambda p, x: layers(p, x) + 0 * jax.grad(
        lambda x: layers(p, x).sum()
    )(x),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_what_does_the_same(name):
    rule = BOTH if name in ("another function", "a jitted function for both") else IN_LAYER
    plan, stored = planned(rule)
    found = jax.jit(plan.apply(SAME[name]))(stored, X)
    if name == "another function":
        found = jnp.tanh(found)
    if name == "an operation more, without a parameter of the plan":
        np.testing.assert_allclose(found, expected(X), atol=1e-3)
    else:
        check(found, X)


@pytest.mark.parametrize("shape", [(1, 16), (9, 16), (2, 3, 16), (16,)])
def test_other_shapes(shape):
    plan, stored = planned()
    (x,) = draw(shape, seed=5)
    found = np.asarray(jax.jit(plan.apply())(stored, x)).reshape(-1, 16)
    np.testing.assert_allclose(found, expected(x.reshape(-1, 16)), atol=1e-4)


def test_an_operation_less():
    plan, stored = planned()

    def first(p, x):
        with jax.named_scope("layer_one"):
            return jnp.tanh(x @ p["one"])

    found = jax.jit(plan.apply(first))(stored, X)
    np.testing.assert_allclose(found, np.tanh(rounded(X, 1) @ rounded(W1, 0)), atol=1e-4)


def shared(params, x):
    """Both layers in one jitted function: the second call shares the trace of the first."""
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
    with jax.named_scope("layer_one"):
        x = layer(x, params["one"])
    with jax.named_scope("block"):
        return layer(x, params["two"])


# What such a program does to a parameter is not what the plan says.
OTHER = {
    "a renamed scope": (lambda p, x: layers(p, x, "block"), "block_one/matmul:0"),
    "no scope": (lambda p, x: x @ p["two"], "matmul:0"),
    "a scope of one layer": (shared, "block/matmul:0"),
    "an operation more of a parameter": (lambda p, x: layers(p, x) @ p["one"], "matmul:0"),
    "a loop outside of the scope": (
        lambda p, x: lax.fori_loop(0, 1, lambda i, x: x @ p["one"], x),
        r"fori_loop\(<lambda>\)/matmul:0",
    ),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_does_not_is_one_error(name):
    fn, op_id = OTHER[name]
    plan, stored = planned()
    message = (
        rf"{op_id} must use args\[0\]\['(one|two)'\] as the plan does, int8 x int8 by rule 0 "
        r"\(layer_(one|two)/matmul:0\), got float: no rule matches\. Make a plan for this"
    )
    for run in (plan.apply(fn), jax.jit(plan.apply(fn))):
        with pytest.raises(QuantizationError, match=message):
            run(stored, X)
    # A plan of this function says what it does.
    own = PtqProvider(IN_LAYER).plan(layers, PARAMS, X)
    check(own.apply()(own.quantize(PARAMS), X), X)


def test_a_parameter_that_another_program_scales_is_another_value():
    """It is computed at each call from what is stored, as with another number."""
    plan, stored = planned(QuantizationRule(weight_qtype="int8"))
    found = plan.apply(lambda p, x: x @ (p["one"] * x[0, 0]))(stored, X)
    np.testing.assert_allclose(found, X @ (rounded(W1, 0) * X[0, 0]), rtol=1e-4, atol=1e-4)


def in_two_ways(params, x, scopes=("layer", "head")):
    """A tied weight, of which one use is quantized otherwise than the other."""
    for name in scopes:
        with jax.named_scope(name):
            x = jnp.tanh(x @ params["one"])
    return x


@pytest.mark.parametrize("weight_qtype", ["int8", None])
def test_a_weight_that_is_used_in_two_ways(weight_qtype):
    """Its operations are told apart by their ids: one can't take the way of another."""
    rules = [IN_LAYER, QuantizationRule(module_path="head", weight_qtype=weight_qtype)]
    plan, stored = planned(rules, in_two_ways)
    h = np.tanh(rounded(X, 1) @ rounded(W1, 0))
    y = np.tanh(h @ rounded(W1, 0))
    np.testing.assert_allclose(jax.jit(plan.apply())(stored, X), y, atol=1e-4)
    both = plan.apply(lambda p, x: in_two_ways(p, x, ("layer", "head"))[:2])
    np.testing.assert_allclose(both(stored, X), y[:2], atol=1e-4)
    for scopes in (("head", "head"), ("layer", "layer2"), ("layer", "block")):
        with pytest.raises(QuantizationError, match=r"int8 x int8 by rule 0.*several ways"):
            plan.apply(lambda p, x, scopes=scopes: in_two_ways(p, x, scopes))(stored, X)


def test_a_rule_that_names_the_part_of_an_operation():
    rule = QuantizationRule(
        op_names=("dot_general",), module_path="layer.*", weight_qtype="int8", act_qtype="int8"
    )
    plan, stored = planned(rule)
    check(jax.jit(plan.apply())(stored, X), X)
    check(plan.apply(lambda p, x: layers(p, x, "layer/of"))(stored, X), X)
    with pytest.raises(QuantizationError, match=r"block_one/dot_general:0 must use"):
        plan.apply(renamed)(stored, X)


def test_another_rule_is_an_error():
    rules = [
        QuantizationRule(module_path="layer.*", weight_qtype="int8", act_qtype="int8"),
        QuantizationRule(weight_qtype="int8"),
    ]
    params = {**PARAMS, "head": W1}
    plan, stored = planned(rules, lambda p, x: layers(p, x) @ p["head"], params)
    with pytest.raises(QuantizationError, match=r"int8 x int8 by rule 0 .*got float x int8 by rul"):
        plan.apply(renamed)(stored, X)


SIZES = {
    "of a parameter": (lambda p, x: x[:, : 4 * len(x)] @ p["one"][: 4 * len(x)], "matmul:0"),
    "of activations": (lambda p, x: jnp.einsum("bi,bc->ic", x, x) @ p["one"], "einsum:0"),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_tile_that_does_not_divide_another_size_is_an_error(name):
    fn, op_id = SIZES[name]
    rule = QuantizationRule(
        weight_qtype="int8", act_qtype="int8", tile_size=4, tile_fallback=None, weights_only=False
    )
    plan, stored = planned(rule, fn)
    assert np.isfinite(plan.apply()(stored, X)).all()
    if name == "of a parameter":
        rule = QuantizationRule(weight_qtype="int8", tile_size=8, tile_fallback=None)
        plan, stored = planned(rule, fn)
    with pytest.raises(QuantizationError, match=rf"{op_id} must .*tile_size . does not divide"):
        plan.apply()(stored, X[:3])


def test_operations_in_another_order_do_not_take_each_others_ranges():
    rule = QuantizationRule(
        weight_qtype="int8", act_qtype="int8", act_static_scale=True, act_batch_axes=()
    )

    def fn(p, x, y):
        return x @ p["one"], y @ p["two"]

    def swapped(p, x, y):
        second = y @ p["two"]
        return x @ p["one"], second

    plan = PtqProvider(rule, strict=True).plan(fn, PARAMS, X, X)
    stored, y = plan.quantize(PARAMS), 100 * X
    ranges = plan.calibrate(PARAMS, [(X, y)])
    found = plan.apply(fn, ranges)(stored, X, y)
    for one, x, w in zip(found, (X, y), (W1, W2), strict=True):
        np.testing.assert_allclose(one, rounded(x, (0, 1)) @ rounded(w, 0), rtol=1e-4, atol=1e-3)
    message = (
        r"matmul:0 must be the operation that the plan has a static range for, of "
        r"args\[0\]\['one'\], got another one, of args\[0\]\['two'\]"
    )
    with pytest.raises(QuantizationError, match=message):
        plan.apply(swapped, ranges)(stored, X, y)
    with pytest.raises(QuantizationError, match=message):
        plan.calibrate(PARAMS, [(X, y)], fn=swapped)


def test_activations_in_another_order_do_not_take_each_others_ranges():
    rule = QuantizationRule(
        weight_qtype="int8", act_qtype="int8", act_static_scale=True, weights_only=False
    )

    def fn(p, x):
        scores = jnp.einsum("bi,ci->bc", x @ p["one"], x)
        return jnp.einsum("bc,ci->bi", scores, x)

    def other(p, x):
        values = jnp.einsum("bc,ci->bi", jnp.ones((4, 4)), x @ p["one"])
        return jnp.einsum("bi,ci->bc", values, x)

    plan = PtqProvider(rule, strict=True).plan(fn, PARAMS, X)
    stored, ranges = plan.quantize(PARAMS), plan.calibrate(PARAMS, [(X,)])
    assert plan.apply(fn, ranges)(stored, X).shape == X.shape
    with pytest.raises(QuantizationError, match=r"einsum:0 must be the operation .*two activatio"):
        plan.apply(other, ranges)(stored, X)


def test_products_of_activations_under_another_scope_are_told():
    rule = QuantizationRule(
        module_path="attention", weight_qtype="int8", act_qtype="int8", weights_only=False
    )

    def fn(p, x, scope="attention"):
        with jax.named_scope(scope):
            return jnp.einsum("bi,ci->bc", x @ p["one"], x)

    plan, stored = planned([rule, BOTH], fn=lambda p, x: fn(p, x) @ p["two"][:4])
    y = rounded(rounded(X, 1) @ rounded(W1, 0), 1) @ rounded(X, 1).T
    run = plan.apply(fn)
    for _ in range(2):
        np.testing.assert_allclose(jax.jit(run)(stored, X), y, rtol=1e-2, atol=0.2)
    part = plan.apply(lambda p, x: x @ p["two"])
    with pytest.warns(QuantizationWarning, match=r"Rule 0 must .* attention/einsum:0, got none"):
        part(stored, X)
    part(stored, X)


@pytest.mark.parametrize("pair", [(stacked, unrolled), (unrolled, stacked)])
def test_another_loop_over_layers(pair):
    fn, other = pair
    params = {"w": np.stack([W1, W2])}
    plan, stored = planned(fn=fn, params=params)
    check(jax.jit(plan.apply(other))(stored, X), X)


def test_another_loop_does_not_take_ranges_of_steps():
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    params = {"w": np.stack([W1, W2])}
    plan, stored = planned(rule, stacked, params)
    ranges = plan.calibrate(params, [(X,)], fn=stacked)
    with pytest.raises(Exception, match="There are no statistics for layer/matmul:0#lhs"):
        plan.apply(unrolled, ranges)(stored, X)


def test_around_transforms():
    plan, stored = planned()
    run = plan.apply()
    check(jax.vmap(run, (None, 0))(stored, X), X)
    check(jax.checkpoint(run)(stored, X), X)
    check(lax.scan(lambda c, x: (c, run(stored, x)), 0, X[:, None])[1][:, 0], X)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("data")
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(jax.P(), spec), out_specs=spec)
    check(jax.jit(mapped)(stored, X), X)
    # The gradient is the float program's at the stored values.
    held = {name: plan.dequantize(stored)[name] for name in PARAMS}
    found = jax.grad(lambda x: run(stored, x).sum())(X)
    np.testing.assert_allclose(
        found, jax.grad(lambda x: layers(held, x).sum())(X), rtol=0.1, atol=0.1
    )


@pytest.mark.parametrize("wrap", ["vmap", "grad", "scan", "remat"])
def test_the_error_in_transforms(wrap):
    plan, stored = planned()
    run = plan.apply(lambda p, x: layers(p, x, "block"))
    calls = {
        "vmap": lambda: jax.vmap(run, (None, 0))(stored, X),
        "grad": lambda: jax.grad(lambda x: run(stored, x).sum())(X),
        "scan": lambda: lax.scan(lambda c, x: (c, run(stored, x)), 0, X[:, None]),
        "remat": lambda: jax.checkpoint(run)(stored, X),
    }
    with pytest.raises(QuantizationError, match="block_one/matmul:0 must use"):
        calls[wrap]()


def test_a_plan_from_a_file(tmp_path):
    plan, stored = planned()
    save(tmp_path / "stored.safetensors", stored, plan)
    again = pickle.loads(pickle.dumps(plan))
    held = load(tmp_path / "stored.safetensors", plan=again)
    check(again.apply()(held, X), X)
    with pytest.raises(QuantizationError, match="block_one/matmul:0 must use"):
        again.apply(renamed)(held, X)


def renamed(params, x):
    return layers(params, x, "block")


def test_a_derivative_rule_of_the_program():
    """JAX transposes what is in it, so that the activations there stay float."""

    @jax.custom_jvp
    def layer(x, w):
        return jnp.tanh(x @ w)

    @layer.defjvp
    def rule(primals, tangents):
        (x, w), (dx, _) = primals, tangents
        y = layer(x, w)
        return y, (1 - y * y) * (dx @ w)

    plan, stored = planned(BOTH, lambda p, x: layer(layer(x, p["one"]), p["two"]))
    check(plan.apply()(stored, X), X)
    found = jax.grad(lambda x: plan.apply()(stored, x).sum())(X)
    w1, w2, h = rounded(W1, 0), rounded(W2, 0), np.tanh(rounded(X, 1) @ rounded(W1, 0))
    y = expected(X)
    np.testing.assert_allclose(found, (((1 - y * y) @ w2.T) * (1 - h * h)) @ w1.T, atol=1e-3)


def test_the_patch_engine():
    provider = PtqProvider(IN_LAYER, engine="patch", strict=True)
    plan = provider.plan(layers, PARAMS, X)
    check(plan.apply()(PARAMS, X), X)
    with pytest.raises(QuantizationError, match="block_one/matmul:0 must use"):
        plan.apply(renamed)(PARAMS, X)


def test_a_parameter_that_the_plan_leaves_float_is_free():
    """What no rule quantizes can be used in any way."""
    rule = QuantizationRule(weight_path=r"\['one'\]", weight_qtype="int8")
    plan, stored = planned(rule)
    found = plan.apply(lambda p, x: jnp.einsum("bi,io->bo", x, p["two"]))(stored, X)
    np.testing.assert_allclose(found, X @ W2, rtol=1e-4, atol=1e-4)
