"""A third party's provider that rounds weights, with a plan or without."""

import dataclasses

import jax
import jax.numpy as jnp

from interception_core import Interceptor, get_engine


class Rounding:
    """A third party's provider: it knows nothing of provider-xla, and has a plan or none."""

    engine = None
    disable_jit = False

    def interceptor(self):
        def handler(call, lhs, rhs, **params):
            return call.proceed(lhs, jnp.round(jnp.asarray(rhs) * 64) / 64, **params)

        return Interceptor({"primitive:dot_general": handler}, key="rounding")

    def apply(self, fn):
        return get_engine(self.engine).wrap(fn, self.interceptor())


@dataclasses.dataclass
class RoundingPlan:
    problems: list
    weights: list

    def quantize(self, params):
        return jax.tree.map(
            lambda w: jnp.round(w * 64) / 64 if getattr(w, "ndim", 0) > 1 else w, params
        )

    def apply(self, fn):
        return fn


class Planning(Rounding):
    def plan(self, fn, params, *args):
        return RoundingPlan([], [w for w in jax.tree.leaves(params) if getattr(w, "ndim", 0) > 1])
