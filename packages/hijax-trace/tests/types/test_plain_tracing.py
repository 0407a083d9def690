"""Importing hijax-trace neither slows nor changes the tracing of plain functions."""

import json

import pytest

from jaxtap_testkit.processes import run_python

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp
from jax import lax
from jax._src import core


def model(x, w):
    h = jax.nn.gelu(x @ w)
    h = lax.scan(lambda c, _: (jnp.tanh(c @ w), c.sum()), h, None, length=3)[0]
    h = jax.checkpoint(lambda h: jnp.sin(h) * h)(h)
    return lax.cond(h.sum() > 0, jnp.sum, lambda h: -h.sum(), h)


def equations(jaxpr):
    n = 0
    for eqn in jaxpr.eqns:
        n += 1
        for value in jax.tree.leaves(eqn.params):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                n += equations(inner)
    return n


def facts():
    x, w = jnp.ones((4, 8)), jnp.ones((8, 8))
    traces, binds = [], []

    def counted(x, w):
        traces.append(1)
        return model(x, w)

    bind = core.Primitive.bind_with_trace

    def counting(self, *args):
        binds.append(self.name)
        return bind(self, *args)

    core.Primitive.bind_with_trace = counting
    try:
        f = jax.jit(counted)
        gradient = jax.jit(jax.grad(counted, 1))
        jaxpr = jax.make_jaxpr(jax.vmap(counted, (0, None)))(x[None], w)
        f(x, w), f(x, w), gradient(x, w), gradient(x, w)
    finally:
        core.Primitive.bind_with_trace = bind
    return {
        "equations": equations(jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr),
        "jaxpr": str(jaxpr),
        "text": f.lower(x, w).as_text(),
        "gradient": gradient.lower(x, w).as_text(),
        "traces": len(traces),
        "binds": binds,
        "jit": str(type(jax.jit(counted))),
    }


if sys.argv[1] == "with":
    import hijax_trace

    for name in hijax_trace.__all__:
        if name != "TraceEngine":
            getattr(hijax_trace, name)
    jax.jit(lambda x: x)(1.0)
print(json.dumps(facts()))
"""

NO_JAX = """
import sys
import hijax_trace
assert "jax" not in sys.modules
assert "Box" in dir(hijax_trace)
"""


def run(*args):
    return run_python(*args).stdout


@pytest.mark.slow
def test_plain_programs_are_the_same_with_and_without():
    without, with_it = (json.loads(run("-c", PROGRAM, word)) for word in ("without", "with"))
    assert without["equations"] > 20
    assert without["traces"] == 3
    assert with_it == without


def test_importing_does_not_import_jax():
    run("-c", NO_JAX)
