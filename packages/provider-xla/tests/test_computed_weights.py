"""The plan names each weight that is computed from parameters: nothing of it is stored."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from provider_xla import PtqProvider, QuantizationError, QuantizationRule, QuantizationWarning

RULES = {
    "weights": QuantizationRule(weight_qtype="int8"),
    "both": QuantizationRule(weight_qtype="int8", act_qtype="int8"),
}
MASK = (np.arange(48).reshape(8, 6) % 2).astype(np.float32)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


W, STACK, X = draw(8, 6), draw(3, 8, 8), draw(4, 8)

# Programs whose weights are computed from parameters in all ways that were met in model libraries.
IDIOMS = {
    "split": (lambda p, x: sum(x @ v for v in jnp.split(p, 3, axis=1)), W),
    "index": (lambda p, x: sum(x @ p[i] for i in range(3)), STACK),
    "fori_loop": (lambda p, x: lax.fori_loop(0, 3, lambda i, c: c @ p[i], x), STACK),
    "index in a scan": (
        lambda p, x: lax.scan(
            lambda c, i: (c @ lax.dynamic_index_in_dim(p, i, 0, False), None), x, jnp.arange(3)
        )[0],
        STACK,
    ),
    "unstack": (lambda p, x: sum(x @ w for w in jnp.unstack(p)), STACK),
    "concatenate": (lambda p, x: x @ jnp.concatenate([p["a"], p["b"]], 1), {"a": W, "b": -W}),
    "stack and vmap": (
        lambda p, x: jax.vmap(lambda w: x @ w)(jnp.stack([p["a"], p["b"]])),
        {"a": W, "b": -W},
    ),
    "flip": (lambda p, x: x @ jnp.flip(p, 0), W),
    "mask": (lambda p, x: x @ (p * MASK), W),
    "scale": (lambda p, x: x @ (p * 0.125), W),
    "weight norm": (
        lambda p, x: x @ (p["v"] / jnp.linalg.norm(p["v"], axis=0) * p["g"]),
        {"v": W, "g": draw(6)},
    ),
    "low rank": (
        lambda p, x: x @ (p["w"] + p["a"] @ p["b"]),
        {"w": W, "a": draw(8, 2), "b": draw(2, 6)},
    ),
    "pad": (lambda p, x: x @ jnp.pad(p, ((0, 2), (0, 0))), W[:6]),
    "tile": (lambda p, x: x @ jnp.tile(p, (2, 1)), W[:4]),
    "routed": (lambda p, x: jnp.einsum("ab,abc->ac", x, p[jnp.argmax(x[:, :3], 1)]), STACK),
    "in a jitted function": (lambda p, x: jax.jit(lambda w, x: x @ (w * 2))(p, x), W),
    "steps": (
        lambda p, x: lax.scan(lambda c, w: (jnp.tanh(c @ (w * w)), None), x, p)[0],
        STACK,
    ),
    "flipped kernel": (
        lambda p, x: lax.conv_transpose(x[None, :, :], p, (1,), "SAME", transpose_kernel=True),
        draw(3, 5, 8),
    ),
}


def plan_of(fn, params, rule, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationWarning)
        return PtqProvider([rule], **options).plan(fn, params, X)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", IDIOMS)
def test_named(name, rule):
    fn, params = IDIOMS[name]
    plan = plan_of(fn, params, RULES[rule])
    # The low-rank part is a product of two parameters, which are stored.
    assert bool(plan.weights) == (name == "low rank")
    assert plan.problems
    assert all("its weight" in text and "args[0]" in text for text in plan.problems)
    with pytest.raises(QuantizationError, match=r"its weight.*args\[0\]"):
        plan_of(fn, params, RULES[rule], strict=True)


@pytest.mark.parametrize("rule", RULES)
def test_what_is_closed_over_is_not_a_parameter(rule):
    """Products of two values that both come from parameters are parts of one, and no fault."""
    params = {"q": W, "k": -W}
    fn = lambda p: jax.nn.softmax((X @ p["q"]) @ (X @ p["k"]).T)  # noqa: E731
    plan = PtqProvider([RULES[rule]], strict=True).plan(fn, params)
    assert sorted(plan.weights) == ["args[0]['k']", "args[0]['q']"]
    assert not plan.problems
