"""Finders: a package tells TraceEngine which equations spell out a function.

``silu`` and its finder are written as a third party would: with public names alone.
"""

import sys
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Jaxpr, Literal, Var

import hijax_trace as ht
from interception_core import Interceptor, TargetError

X = jnp.linspace(-2, 2, 6)
LOOKED: list[Jaxpr] = []


def parts(eqn):
    """The equations that an equation consists of: a function of JAX may be a call."""
    program = ht.called(eqn)
    if program is None:
        return [eqn]
    return [part for one in program.jaxpr.eqns for part in parts(one)]


def factor(eqns):
    """The factor in a sigmoid of a product; None for other equations."""
    names = [one.primitive.name for one in eqns]
    if names == ["logistic"]:
        return 1.0
    if names == ["mul", "logistic"]:
        numbers = [x.val for x in eqns[0].invars if isinstance(x, Literal)]
        return float(jnp.asarray(numbers[0])) if numbers else None
    return None


class Written(NamedTuple):
    """What a group computes."""

    by: float

    def __call__(self, x):
        return jax.nn.silu(self.by * x) / self.by


def find_silu(jaxpr):
    LOOKED.append(jaxpr)
    gates = {}
    for i, eqn in enumerate(jaxpr.eqns):
        own = parts(eqn)
        if len(eqn.invars) == 1 and (by := factor(own)) is not None:
            gates[eqn.outvars[0]] = i, eqn.invars[0], by
        elif [one.primitive.name for one in own] == ["mul"] and isinstance(eqn.invars[1], Var):
            x, y = eqn.invars
            first, operand, by = gates.get(y, (None, None, 1.0))
            if operand is x:
                yield ht.Group("silu", (first, i), (x,), Written(by), {y: "its gate"})


@ht.found_by(find_silu)
def silu(*values, written, also_used=()):
    """``x * sigmoid(x)``, as programs write it."""
    return written(*values)


@pytest.fixture(autouse=True)
def acme(monkeypatch):
    """The third party's package."""
    monkeypatch.setitem(sys.modules, "acme", SimpleNamespace(silu=silu))


def plain(x):
    return jnp.sin(x * jax.nn.sigmoid(x))


def scaled(x):
    return x * jax.jit(lambda x: lax.logistic(2 * x))(x)


PROGRAMS = {
    "plain": (plain, ["silu:0"]),
    "primitives": (lambda x: x * lax.logistic(x), ["silu:0"]),
    "a factor": (scaled, ["silu:0"]),
    "jitted": (jax.jit(plain), ["silu:0"]),
    "twice": (lambda x: plain(plain(x)), ["silu:0", "silu:1"]),
    "a loop": (
        lambda x: lax.scan(lambda c, _: (plain(c), None), x, None, length=2)[0],
        ["scan(<lambda>)/silu:0"],
    ),
    "mapped": (jax.vmap(plain), ["silu:0"]),
    "a sigmoid of another value": (lambda x: x * jax.nn.sigmoid(x + 1), []),
}


def tap(fn, handler, **others):
    return ht.TraceEngine().wrap(fn, Interceptor({"acme.silu": handler, **others}))


def leave(call, *args, **kwargs):
    return NotImplemented


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_handler_is_asked_about_what_a_finder_finds(name):
    fn, ids = PROGRAMS[name]
    seen = []

    def compute(call, *values, written, also_used):
        seen.append(call.op_id)
        assert also_used == ()
        return written(*values)

    for run in (tap(fn, compute), jax.jit(tap(fn, compute))):
        seen.clear()
        np.testing.assert_allclose(run(X), fn(X), rtol=1e-5, atol=1e-6)
        assert seen == ids


def test_its_result_replaces_the_equations_and_is_differentiated():
    tapped = tap(plain, lambda call, x, *, written, also_used: 3 * x)
    text = str(jax.make_jaxpr(tapped)(X))
    assert "logistic" not in text
    np.testing.assert_allclose(tapped(X), jnp.sin(3 * X))
    slope = jax.grad(lambda x: tapped(x).sum())(X)
    np.testing.assert_allclose(slope, 3 * jnp.cos(3 * X), rtol=1e-6)


def test_without_the_target_nothing_is_looked_for():
    LOOKED.clear()
    tapped = ht.TraceEngine().wrap(plain, Interceptor({"primitive:mul": leave}))
    assert str(jax.make_jaxpr(tapped)(X)) == str(jax.make_jaxpr(plain)(X))
    assert LOOKED == []
    tap(plain, leave)(X)
    assert LOOKED != []


def test_a_function_that_jax_inlines_is_one_equation():
    """Its program is traced and derived once for all of its calls."""
    LOOKED.clear()
    tap(plain, leave)(X)
    calls = [ht.called(eqn) for eqn in LOOKED[-1].eqns]
    assert [len(call.jaxpr.eqns) for call in calls if call is not None] == [1, 1, 1]


def test_a_handler_may_leave_it_to_those_of_its_parts():
    seen = []

    def note(call, *args, **kwargs):
        seen.append((call.op_id, [one.provenance for one in call.operands]))
        return NotImplemented

    tapped = tap(plain, note, **{"primitive:mul": note})
    np.testing.assert_allclose(tapped(X), plain(X), rtol=1e-6)
    assert seen == [("silu:0", ["args[0]"]), ("mul:0", ["args[0]", None])]


def test_what_the_program_uses_elsewhere_is_computed():
    def gated(x):
        gate = jax.nn.sigmoid(x)
        return x * gate, gate

    def dead(x):
        gate = jax.nn.sigmoid(x)
        gate.sum()
        return x * gate

    seen = []

    def zero(call, x, *, written, also_used):
        seen.append(also_used)
        return jnp.zeros_like(x)

    out, gate = tap(gated, zero)(X)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_allclose(gate, jax.nn.sigmoid(X), rtol=1e-6)
    assert "logistic" not in str(jax.make_jaxpr(tap(dead, zero))(X))
    assert seen == [("its gate",), ()]


GROUPS = {
    "members must be numbers of the 2 equations, in order, got []": (),
    "in order, got [1, 0]": (1, 0),
    "in order, got [0, 2]": (0, 2),
    "inputs must be variables": (0, 1),
}


@pytest.mark.parametrize("message", GROUPS)
def test_a_wrong_group_is_said(message, monkeypatch):
    def find(jaxpr):
        return [ht.Group("bad", GROUPS[message], jaxpr.eqns[0].outvars, jnp.sin)]

    bad = ht.found_by(find)(lambda *values, written, also_used=(): written(*values))
    monkeypatch.setattr(sys.modules["acme"], "bad", bad, raising=False)
    tapped = tap(lambda x: lax.cos(lax.sin(x)), leave, **{"acme.bad": leave})
    with pytest.raises(TargetError) as error:
        tapped(X)
    assert message in str(error.value)
    assert "Mend the finder of 'bad'." in str(error.value)


def test_a_target_must_be_a_function():
    with pytest.raises(TargetError, match="must be a plain function, got"):
        ht.found_by(find_silu)(jax.jit(silu))
