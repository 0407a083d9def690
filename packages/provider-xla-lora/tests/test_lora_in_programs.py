"""Adapters in programs of every kind: odd names, classes, derivatives, lookups, explicit axes."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import provider_xla as xla
from jaxtap_testkit.meshes import grid, put
from jaxtap_testkit.pytree_classes import Dense
from jaxtap_testkit.xla_samples import draw

RULE = xla.LoraRule(weight_qtype="int8", rank=2)
NAMES = ("q and k", "a, b", "{rule}", "rule 0 has no effect: x", "a'] and args[0]['b")


def prepared(fn, params, *args, rule=RULE):
    """A plan's function, stored parameters, and adapters that change something."""
    plan = xla.PtqProvider(rule).plan(fn, params, *args)
    adapters = jax.tree.map(lambda a: a + 0.1, plan.init_adapters(jax.random.key(0)))
    return plan, plan.quantize(params), adapters


@pytest.mark.parametrize("name", NAMES)
def test_any_name_has_the_adapter_of_a_plain_one(name):
    w, o, x = draw((16, 16), (16, 8), (4, 16))
    plan = xla.PtqProvider(RULE).plan(lambda p, x: (x @ p[name]) @ p["o"], {name: w, "o": o}, x)
    assert [op.adapter for op in plan.ops] == ["rank 2", "rank 2"]
    assert plan.ops[0].paths == (f"args[0][{name!r}]",)
    assert set(plan.adapters) == {f"args[0][{name!r}]", "args[0]['o']"}


def test_short_names_are_explained():
    rules = [xla.Rule(param=r"\['m'\]", weight="int8", lora=2), xla.Rule(weight="int8")]
    w, m, x = draw((64, 32), (32, 32), (4, 64))
    plan = xla.PtqProvider(rules).plan(lambda p, x: x @ p["w"] @ p["m"], {"w": w, "m": m}, x)
    assert "it has an adapter of rank 2: 128 numbers to train" in plan.explain("matmul:1")
    assert "it has an adapter of rank 2" in plan.explain("m")
    assert "adapter" not in plan.explain("w")


def test_a_class_that_checks_its_array_takes_an_adapter():
    w, x = draw((16, 16), (4, 16))

    def model(layer, x):
        return jnp.tanh(x @ layer.w)

    plan, stored, adapters = prepared(model, Dense(w / 4, 16), x)
    run = plan.apply(model)
    gradients = jax.jit(jax.grad(lambda a: jnp.sum(run(stored, x, adapters=a) ** 2)))(adapters)
    assert all(jnp.any(pair["b"] != 0) for pair in gradients.values())
    merged = plan.merge(stored, adapters)
    np.testing.assert_allclose(model(merged, x), run(stored, x, adapters=adapters), atol=1e-4)


@pytest.mark.slow
def test_adapters_are_trained_through_a_derivative_of_the_program():
    w, x = draw((16, 8), (4, 16))
    fn = lambda w, x: jax.jit(jax.grad(lambda w, x: (jnp.tanh(x @ w) ** 2).sum()))(w, x)  # noqa: E731
    plan, stored, adapters = prepared(fn, w, x)
    run = plan.apply(fn)
    total = lambda y: (y**2).sum()  # noqa: E731
    found = jax.jit(jax.value_and_grad(lambda a: total(run(stored, x, adapters=a))))(adapters)
    exact = jax.value_and_grad(lambda a: total(fn(plan.merge(stored, a), x)))(adapters)
    near(found, exact)


def test_lookups_of_one_row_that_a_program_maps():
    (table,), tokens = draw((20, 16)), jnp.asarray([3, 0, 19, -1, 7], jnp.int32)
    mapped = lambda table, tokens: jax.vmap(lambda i: 2 * table[i])(tokens)  # noqa: E731
    rule = xla.LoraRule(op_names=("take", "dot_general"), weight_qtype="int8", rank=2)
    plan, stored, adapters = prepared(mapped, table, tokens, rule=rule)
    run = plan.apply(mapped)
    found = jax.value_and_grad(lambda a: (run(stored, tokens, adapters=a) ** 2).sum())(adapters)
    exact = jax.value_and_grad(lambda a: (mapped(plan.merge(stored, a), tokens) ** 2).sum())(
        adapters
    )
    near(found, exact)


def test_a_program_whose_scopes_no_rule_names():
    w, x = draw((16, 16), (4, 16))

    def model(w, x, scope="layer"):
        with jax.named_scope(scope):
            return x @ w

    rule = xla.LoraRule(module_path="layer.*", weight_qtype="int8", rank=2)
    plan, stored, adapters = prepared(model, w, x, rule=rule)
    merged = plan.merge(stored, adapters)
    found = plan.apply()(stored, x, adapters=adapters)
    np.testing.assert_allclose(found, model(merged, x), atol=1e-3)
    with pytest.raises(xla.QuantizationError, match="block/matmul:0 must use"):
        plan.apply(lambda w, x: model(w, x, "block"))(stored, x, adapters=adapters)


@pytest.mark.slow
@pytest.mark.parametrize(
    "specs",
    [{"up": (None, "b"), "down": ("b", None)}, {"up": ("a", "b"), "down": ("b", "a")}],
    ids=["column and row", "fsdp"],
)
def test_explicit_axes(specs):
    x, up, down = draw((4, 4, 64), (64, 256), (256, 64))

    def model(params, x):
        hidden = jax.nn.relu(jnp.einsum("bsd,df->bsf", x, params["up"]))
        dims = (((2,), (0,)), ((), ()))
        return lax.dot_general(hidden, params["down"], dims, out_sharding=P("a", None, None))

    mesh = grid((2, 4), ("a", "b"), AxisType.Explicit)
    with jax.set_mesh(mesh):
        params = {"up": put(mesh, up, *specs["up"]), "down": put(mesh, down, *specs["down"])}
        x = put(mesh, x, "a")
        rule = xla.LoraRule(weight_qtype="int8", tile_size=32, rank=4)
        plan, stored, adapters = prepared(model, params, x, rule=rule)
        run = plan.apply(model)
        found = jax.jit(lambda a: run(stored, x, adapters=a))(adapters)
        w = {}
        for name in ("up", "down"):
            pair = adapters[f"args[0]['{name}']"]
            a, b = (np.asarray(pair[one], np.float64) for one in "ab")
            w[name] = np.asarray(stored[name].restore(), np.float64) + a @ b
        exact = np.maximum(np.asarray(x, np.float64) @ w["up"], 0) @ w["down"]
        assert np.abs(np.asarray(found, np.float64) - exact).max() <= 1e-3 * np.abs(exact).max()
        gradients = jax.jit(jax.grad(lambda a: (run(stored, x, adapters=a) ** 2).sum()))(adapters)
        assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(gradients))


def test_odd_keys_of_an_equinox_module():
    class Net(eqx.Module):
        heads: dict

        def __call__(self, x):
            return sum(x @ head for head in self.heads.values())

    a, b, x = draw((8, 8), (8, 8), (3, 8))
    params, static = eqx.partition(Net({"q and k": a, "a, b": b}), eqx.is_array)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = xla.PtqProvider(RULE).plan(lambda p, x: eqx.combine(p, static)(x), params, x)
    assert set(plan.adapters) == {"args[0].heads['q and k']", "args[0].heads['a, b']"}


def near(found, exact):
    for ours, theirs in zip(*map(jax.tree.leaves, (found, exact)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)
