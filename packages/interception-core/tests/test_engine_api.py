"""Engines of others: an engine that is built on engine_api alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import interception_core
from interception_core import Interceptor, PatchEngine, engine_api
from interception_core.engine_api import SETTLED, TappedCall, Taps, settled

X = jnp.arange(6.0).reshape(2, 3)


class Outline:
    """Asks no handler itself: notes the calls, and what meets a transformation."""

    def __init__(self):
        self.calls, self.primitives = [], []

    def bind(self, path, trace, primitive, values, params):
        self.primitives.append((path, primitive.name))
        return NotImplemented

    def call(self, function, call, args, kwargs):
        return call(*args, **kwargs)

    def wrap(self, fn, interceptor):
        taps = Taps(interceptor, on_call=self._on_call)

        @functools.wraps(fn)
        def call(*args, **kwargs):
            return taps.run(fn, args, kwargs, observer=self)

        return call

    def _on_call(self, handler, call, *args, **kwargs):
        assert isinstance(call, TappedCall)
        assert call.observer is self
        self.calls.append(call.op_id)
        with call.outside():
            result = handler(call, *args, **kwargs)
        return call.let_run(*args, **kwargs) if result is NotImplemented else result


def let(call, *args, **kwargs):
    return NotImplemented


def model(x):
    with jax.named_scope("block"):
        return jax.nn.softmax(jnp.dot(x, x.T))


def test_the_names_for_engines_are_not_those_for_users():
    assert not set(engine_api.__all__) & set(interception_core.__all__)
    assert all(hasattr(engine_api, name) for name in engine_api.__all__)


@pytest.mark.slow
def test_every_call_of_a_target_is_shown_with_what_it_consists_of():
    targets = ("jax.nn.softmax", "jax.numpy.dot", "jax.numpy.max", "jax.numpy.sum")
    engine = Outline()
    wrapped = engine.wrap(model, Interceptor(dict.fromkeys(targets, let)))
    expected = model(X)
    assert (wrapped(X) == expected).all()
    assert engine.calls[:2] == ["block/dot:0", "block/softmax:0"]
    inside = Interceptor({"jax.nn.softmax": lambda call, x: x})
    assert (engine.wrap(model, inside)(X) == X @ X.T).all()


def test_an_observer_is_shown_what_meets_a_transformation():
    def sine(x):
        with jax.named_scope("block"):
            return jax.lax.sin(x)

    engine = Outline()
    wrapped = engine.wrap(jax.grad(sine), Interceptor({"jax.numpy.dot": let}))
    assert wrapped(2.0) == jnp.cos(2.0)
    assert engine.primitives == [("block", "sin")]


def test_a_call_made_later_asks_who_is_active_then():
    kept = []

    def keep(call, *args):
        kept.append((call.site, call.function))
        return NotImplemented

    class Keeping(Outline):
        def _on_call(self, handler, call, *args, **kwargs):
            return keep(call, *args)

    looked_at = Interceptor({"jax.numpy.dot": let})
    Keeping().wrap(model, looked_at)(X)
    ((site, function),) = kept
    assert site in Taps(looked_at).functions
    assert (function(X, X.T) == X @ X.T).all()
    double = Interceptor({"jax.numpy.dot": lambda call, *args: 2 * call.proceed(*args)})
    assert (PatchEngine().wrap(function, double)(X, X.T) == 2 * (X @ X.T)).all()


@pytest.mark.parametrize("name", [SETTLED, f"{SETTLED}.acme"])
def test_settled_operations_are_under_a_scope_that_says_so(name):
    def program(x):
        with settled(name):
            x = jnp.sin(x)
        return jnp.cos(x)

    sin, cos = jax.make_jaxpr(program)(1.0).eqns
    assert str(sin.source_info.name_stack) == name
    assert str(cos.source_info.name_stack) == ""


def test_an_engine_patches_functions_while_it_taps():
    seen = []

    def note(original, args, kwargs):
        seen.append([Taps.sees_program(), len(Taps.observers())])
        with Taps.unobserved():
            seen[-1].append(len(Taps.observers()))
        with Taps.unobserved(lambda observer: observer is engine):
            seen[-1].append(len(Taps.observers()))
        return original(*args, **kwargs)

    taps = Taps(
        Interceptor({"jax.numpy.dot": let}), patches=[engine_api.patch_calls(jax.eval_shape, note)]
    )
    engine = Outline()

    def shape():
        return jax.eval_shape(jnp.sin, X)

    assert taps.run(shape, (), {}, observer=engine) == shape()
    assert seen == [[True, 1, 0, 1]]
    assert taps.run(shape, (), {}) == shape()  # without an observer
    assert seen[1:] == [[False, 0, 0, 0]]
    PatchEngine().wrap(shape, Interceptor({"jax.numpy.dot": let}))()
    assert len(seen) == 2


def test_a_patch_is_around_those_of_every_engine():
    """Whichever is installed first: JAX's functions are changed by both, and by none in the end."""
    seen = []

    def note(original, args, kwargs):
        seen.append("patch")
        return original(*args, **kwargs)

    def tell(call, x, w):
        seen.append(call.is_linear(x))
        return NotImplemented

    def program():
        return jax.linear_transpose(lambda x: jnp.dot(x, jnp.eye(2)), jnp.ones(2))(jnp.ones(2))

    interceptor, code = Interceptor({"jax.numpy.dot": tell}), jax.linear_transpose.__code__
    taps = Taps(interceptor, patches=[engine_api.patch_calls(jax.linear_transpose, note)])
    patched = PatchEngine().wrap(program, interceptor)

    def ours():
        return taps.run(program, (), {})

    assert ours()[0].sum() == 2
    assert seen == ["patch", True]
    other = Interceptor({"jax.numpy.sin": let})
    PatchEngine().wrap(ours, other)()
    taps.run(PatchEngine().wrap(program, other), (), {})
    assert seen == ["patch", True] * 3
    patched()
    assert seen[6:] == [True]
    assert jax.linear_transpose.__code__ is code


def test_an_engine_is_asked_first_for_the_result_of_an_equal_call():
    """Arguments are as they are given, and ``on_call`` is asked about the rest alone."""
    asked = []

    class Remembering(Outline):
        def _on_call(self, handler, call, *args, **kwargs):
            asked.append("on_call")
            return super()._on_call(handler, call, *args, **kwargs)

        def wrap(self, fn, interceptor):
            taps = Taps(interceptor, on_call=self._on_call, again=self.again)
            return lambda *args: taps.run(fn, args, {}, observer=self)

        def again(self, observer, site, args, kwargs):
            assert observer is self
            assert site in Taps(looked_at).functions
            asked.append(("again", len(args), kwargs))
            return 2 * args[0] if kwargs else NotImplemented

    looked_at = Interceptor({"jax.numpy.dot": let})
    fn = Remembering().wrap(lambda x: jnp.dot(jnp.dot(x, x.T, precision=None), x.T), looked_at)
    np.testing.assert_array_equal(fn(X), 2 * np.asarray(X) @ np.asarray(X).T)
    assert asked == [("again", 2, {"precision": None}), ("again", 2, {}), "on_call"]
