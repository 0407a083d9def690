"""The same rule for the same function, run by both libraries."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from flax import linen

import provider_xla as xla

KEY = jax.random.key(0)


class Model(linen.Module):
    """A function of an input and one parameter, as Qwix wants it: a Flax model."""

    op: Callable[..., jax.Array]
    shape: tuple[int, ...]
    dtype: Any

    @linen.compact
    def __call__(self, x):
        w = self.param("w", linen.initializers.zeros_init(), self.shape, self.dtype)
        return self.op(x, w)


def qwix_ptq(op, rule, w, x):
    """Quantizes the parameter, then runs Qwix's model on it."""
    provider = qwix.PtqProvider([qwix.QuantizationRule(**rule)])
    model = qwix.quantize_model(Model(op, w.shape, w.dtype), provider)
    kinds = jax.eval_shape(model.init, KEY, x)["params"]
    return model.apply({"params": qwix.quantize_params({"w": w}, kinds)}, x)


def qwix_qt(op, rule, w, x, **collections):
    """Runs Qwix's training model; collections are Flax's, beside the parameters."""
    provider = qwix.QtProvider([qwix.QtRule(**rule)])
    model = qwix.quantize_model(Model(op, w.shape, w.dtype), provider)
    return model.apply({"params": {"w": w}, **collections}, x)


def _on_params(op):
    return lambda params, x: op(x, params["w"])


def our_ptq(op, rule, w, x):
    """Plans, quantizes the parameter, then runs the function on it."""
    fn, params = _on_params(op), {"w": w}
    plan = xla.PtqProvider([xla.QuantizationRule(**rule)], strict=True).plan(fn, params, x)
    return plan.apply(fn)(plan.quantize(params), x)


def our_qt(op, rule, w, x, **options):
    """Runs the function as in training."""
    provider = xla.QtProvider([xla.QtRule(**rule)], strict=True)
    return provider.apply(_on_params(op), **options)({"w": w}, x)


RUNS = {"ptq": (our_ptq, qwix_ptq), "qt": (our_qt, qwix_qt)}


def gradients(run, op, rule, w, x, cotangent):
    """Returns the gradients by the input and by the parameter."""

    def loss(x, w):
        return jnp.sum(run(op, rule, w, x) * cotangent)

    return jax.grad(loss, (0, 1))(x, w)
