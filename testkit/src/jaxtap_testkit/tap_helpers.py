"""What the tests of the trace engine share: recorders, comparisons, programs' text."""

import re

import jax
import numpy as np

from hijax_trace import TraceEngine
from interception_core import Interceptor

ENGINE = TraceEngine()


class Log:
    """A handler that records calls and lets them run."""

    def __init__(self):
        self.calls = []
        self.ids = []
        self.operands = []

    def __call__(self, call, *args, **params):
        self.ids.append(call.op_id)
        self.operands.append(call.operands)
        self.calls.append((call.op_name, call.level, call.module_path, call.within))
        return NotImplemented

    @property
    def names(self):
        return [call[0] for call in self.calls]

    def clear(self):
        self.__init__()


def look(call, *args, **params):
    """A handler that asks nothing, and so treats equal calls alike."""
    return NotImplemented


def tap(fn, handler, *targets, key=None, path_key=None):
    return ENGINE.wrap(fn, Interceptor(dict.fromkeys(targets, handler), key, path_key=path_key))


def ids_of(fn, *args, targets):
    """Return the ids of a program's operations, without compiling it."""
    log = Log()
    jax.eval_shape(tap(fn, log, *targets), *args)
    return log.ids


def times(factor):
    """Return a handler that multiplies results."""

    def handler(call, *args, **params):
        return jax.tree.map(lambda x: x * factor, call.proceed(*args, **params))

    return handler


def assert_same(actual, expected):
    """Assert that two results are equal: structure, types, and every bit."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert type(a) is type(b)
        if not hasattr(a, "dtype"):
            assert a == b
            continue
        assert jax.typeof(a) == jax.typeof(b)
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_close(actual, expected, rtol=1e-6):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=1e-6)


def stablehlo(fn, *args, debug_info=False):
    """Return a program's StableHLO, but for the module's name."""
    text = jax.jit(fn).lower(*args).as_text(debug_info=debug_info)
    return re.sub(r"(?m)^module @\S+", "module @m", text)


def equations(jaxpr):
    """Return how many equations a program has, at every depth."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    inner = [
        part
        for eqn in jaxpr.eqns
        for value in eqn.params.values()
        for part in (value if isinstance(value, tuple | list) else (value,))
        if hasattr(part, "eqns") or hasattr(part, "jaxpr")
    ]
    return len(jaxpr.eqns) + sum(map(equations, inner))
