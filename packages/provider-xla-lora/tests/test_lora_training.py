"""What training with adapters computes, keeps and drops."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtap_testkit.xla_samples import draw
from provider_xla import LoraRule, PtqProvider, QuantizationRule

QLORA = LoraRule(weight_qtype="int8", rank=2, alpha=3.0)


def layer(h, p):
    return h + jax.nn.gelu(h @ p["up"]) @ p["down"], None


LAYERS = {"up": (3, 16, 40), "down": (3, 40, 16)}
ONE = {"up": (16, 40), "down": (40, 16)}
MODELS = {
    "plain": (lambda p, x: layer(layer(x, p)[0], p)[0], ONE),
    "scan": (lambda p, x: lax.scan(layer, x, p)[0], LAYERS),
    "scan of remat": (lambda p, x: lax.scan(jax.checkpoint(layer), x, p)[0], LAYERS),
    "scan of cond": (
        lambda p, x: lax.scan(
            lambda h, p: (
                lax.cond(h.sum() > 0, lambda p: layer(h, p)[0], lambda p: 2.0 * h, p),
                None,
            ),
            x,
            p,
        )[0],
        LAYERS,
    ),
    "closed over": (lambda p, x: lax.scan(lambda h, _: layer(h, p), x, None, length=3)[0], ONE),
    "vmap": (lambda p, x: jax.vmap(lambda row: layer(row, p)[0])(x), ONE),
}


def prepared(fn, shapes, *rules):
    params = dict(zip(shapes, (0.2 * w for w in draw(*shapes.values())), strict=True))
    (x,) = draw((5, 16), seed=1)
    plan = PtqProvider(rules).plan(fn, params, x)
    adapters = jax.tree.map(lambda a: a + 0.1, plan.init_adapters(jax.random.key(0)))
    return plan, plan.quantize(params), adapters, x, plan.apply(fn)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_base_gets_no_gradient_work(name):
    fn, shapes = MODELS[name]
    _, stored, adapters, x, run = prepared(fn, shapes, QLORA)
    step = jax.jit(jax.grad(lambda a, s, x: (run(s, x, adapters=a) ** 2).sum()))
    text = step.lower(adapters, stored, x).compile().as_text()
    contractions = re.findall(r"= (\S+?)\{\S* dot\(", text)
    assert len(contractions) >= 10  # it is there that a gradient would be
    assert not {p for p in contractions if "16,40" in p or "40,16" in p}
    # Nor is there ever a float array of all layers, in the backward pass either.
    assert not re.search(r"f32\[3,(16,40|40,16)\]", text)


@pytest.mark.slow
def test_without_adapters_it_is_the_quantized_program():
    fn, shapes = MODELS["scan"]
    plan, stored, adapters, x, run = prepared(fn, shapes, QLORA)
    plain = PtqProvider(QuantizationRule(weight_qtype="int8")).plan(
        fn, plan.merge(stored, adapters), x
    )
    np.testing.assert_array_equal(run(stored, x), plain.apply(fn)(stored, x))
    # New adapters change nothing.
    new = run(stored, x, adapters=plan.init_adapters(jax.random.key(0)))
    np.testing.assert_allclose(new, run(stored, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"sparsity": "2:4"}], ids=["dense", "sparse"])
def test_parameters_that_are_not_stored_are_quantized_without_their_adapter(fields):
    w, x = draw((16, 8), (4, 16))
    rule = LoraRule(weight_qtype="int4", rank=2, alpha=3.0, **fields)
    plan = PtqProvider(rule).plan(lambda w, x: x @ w, w, x)
    adapters = jax.tree.map(lambda a: a + 0.1, plan.init_adapters(jax.random.key(0)))
    run = plan.apply(lambda w, x: x @ w)
    a, b = (np.asarray(adapters["args[0]"][name], np.float64) for name in "ab")
    expected = np.asarray(run(w, x), np.float64) + 1.5 * np.asarray(x, np.float64) @ a @ b
    np.testing.assert_allclose(run(w, x, adapters=adapters), expected, rtol=1e-4, atol=1e-4)


def test_init_is_uniform_within_the_root_of_fan_in():
    (w,), (x,) = draw((64, 2, 96)), draw((4, 64), seed=1)
    rule = LoraRule(rank=32)
    plan = PtqProvider(rule).plan(lambda w, x: jnp.einsum("bd,dhe->bhe", x, w), w, x)
    pair = plan.init_adapters(jax.random.key(3), jnp.bfloat16)["args[0]"]
    assert (pair["a"].dtype, pair["a"].shape) == (jnp.bfloat16, (64, 32))
    assert not pair["b"].any()
    assert pair["b"].shape == (32, 2, 96)
    a = np.asarray(pair["a"], np.float64)
    assert np.abs(a).max() <= 1 / 8
    assert abs(a.std() - 1 / 8 / 3**0.5) < 0.004
    assert plan.adapters["args[0]"].form.scale == 1  # alpha is the rank


@pytest.mark.slow
def test_many_adapters_at_once():
    fn, shapes = MODELS["scan"]
    _, stored, adapters, x, run = prepared(fn, shapes, QLORA)
    many = jax.tree.map(lambda a: jnp.stack([a, 2 * a, -a]), adapters)
    found = jax.jit(jax.vmap(lambda a: run(stored, x, adapters=a)))(many)
    for i, y in enumerate(found):
        one = jax.tree.map(lambda a, i=i: a[i], many)
        np.testing.assert_allclose(y, run(stored, x, adapters=one), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_parameters_without_adapters_can_be_trained_beside_them():
    def fn(params, x):
        return x @ params["w"] + params["bias"]

    w, bias, x = draw((8, 6), (1, 6), (4, 8))
    plan = PtqProvider(QLORA).plan(fn, {"w": w, "bias": bias}, x)
    stored, run = plan.quantize({"w": w, "bias": bias}), plan.apply(fn)

    def loss(adapters, bias):
        return run({**stored, "bias": bias}, x, adapters=adapters).sum()

    _, found = jax.grad(loss, argnums=(0, 1))(plan.init_adapters(jax.random.key(0)), bias)
    np.testing.assert_allclose(found, np.full((1, 6), 4.0), rtol=1e-6)


DROPOUT = LoraRule(rank=2, alpha=2.0, dropout=0.25)


def test_dropout_drops_what_the_adapter_sees():
    (w,), x = draw((1000, 4)), jnp.ones((3, 1000))
    plan = PtqProvider(DROPOUT).plan(lambda w, x: x @ w, w, x)
    run = jax.jit(plan.apply(lambda w, x: x @ w))
    # The adapter adds up what it sees, into the first column.
    adapters = {
        "args[0]": {"a": jnp.ones((1000, 2)) / 1000, "b": jnp.zeros((2, 4)).at[:, 0].set(1)}
    }
    base = run(w, x)
    assert np.allclose(run(w, x, adapters=adapters) - base, [2, 0, 0, 0], atol=1e-3)
    keys = [jax.random.key(i) for i in range(2)]
    first, second = (
        run(w, x, adapters=adapters, dropout_key=key) - base for key in keys
    )  # fmt: skip
    np.testing.assert_allclose(first[:, 1:], 0, atol=1e-6)
    kept = np.asarray(first[:, 0] / 2 * 0.75)  # a share of 1000 elements, of each row
    assert np.all(np.abs(kept - 0.75) < 0.06)
    assert len(set(kept.round(4))) > 1
    assert not np.allclose(first, second)
    again = run(w, x, adapters=adapters, dropout_key=keys[0]) - base
    np.testing.assert_array_equal(first, again)
    old = run(w, x, adapters=adapters, dropout_key=jax.random.key_data(keys[0])) - base
    np.testing.assert_array_equal(first, old)


def test_each_step_of_a_scan_and_each_contraction_drops_others():
    def fn(ws, x):
        return lax.scan(lambda h, w: (h, (x @ w, x @ w)), x, ws)[1]

    ws, x = jnp.zeros((3, 200, 4)), jnp.ones((1, 200))
    plan = PtqProvider(DROPOUT).plan(fn, ws, x)
    adapters = {"args[0]": {"a": jnp.ones((3, 200, 2)), "b": jnp.ones((3, 2, 4))}}
    found = plan.apply(fn)(ws, x, adapters=adapters, dropout_key=jax.random.key(0))
    sums = np.stack(found)[..., 0, 0].ravel()
    assert len(set(sums.tolist())) == 6


@pytest.mark.slow
def test_dropout_in_training_keeps_gradients_of_what_was_seen():
    (w,), (x,) = draw((50, 4)), draw((3, 50), seed=1)
    plan = PtqProvider(DROPOUT).plan(lambda w, x: x @ w, w, x)
    run, key = plan.apply(lambda w, x: x @ w), jax.random.key(0)
    b = np.ones((2, 4))

    def loss(a):
        adapters = {"args[0]": {"a": a, "b": jnp.asarray(b, jnp.float32)}}
        return run(w, x[:1], adapters=adapters, dropout_key=key).sum()

    gradient = np.asarray(jax.grad(loss)(jnp.zeros((50, 2))), np.float64)
    seen = gradient[:, 0] / 4 / np.asarray(x[0], np.float64)  # 0, or 1 / 0.75
    assert set(seen.round(3)) == {0.0, 1.333}
