"""What handlers attach to values, and how far it goes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxtap_testkit.tap_helpers import assert_close, assert_same, tap

pytestmark = pytest.mark.sample(2)

X = jnp.linspace(-1, 1, 4)


def marks(fn, *args, mode=lambda f: f):
    """Marks what exp returns and what tan is given. Returns what tanh and sin find."""
    found = []

    def handler(call, x, **params):
        if call.op_name == "exp":
            return call.annotate(call.proceed(x, **params), mark="exp")
        found.append(dict(call.operands[0].metadata))
        if call.op_name == "tan":
            call.annotate(x, argument=True)
        return NotImplemented

    names = ("exp", "tanh", "sin", "tan")
    wrapped = mode(tap(fn, handler, *(f"primitive:{name}" for name in names)))
    assert_close(wrapped(*args), mode(fn)(*args))
    return found


EXP = {"mark": "exp"}
PROGRAMS = {
    "straight": (lambda x: lax.tanh(lax.exp(x)), [EXP]),
    "computed from": (lambda x: lax.tanh(lax.exp(x) * 2), [{}]),
    "argument": (lambda x: (lax.tan(x), lax.tanh(x))[1], [{}, {"argument": True}]),
    "argument and result": (
        lambda x: (lambda y: (lax.tan(y), lax.tanh(y))[1])(lax.exp(x)),
        [EXP, {**EXP, "argument": True}],
    ),
    "into jit": (lambda x: jax.jit(lax.tanh)(lax.exp(x)), [EXP]),
    "closed over by jit": (
        lambda x: (lambda y: jax.jit(lambda: lax.tanh(y))())(lax.exp(x)),
        [EXP],
    ),
    "out of jit": (lambda x: lax.tanh(jax.jit(lax.exp)(x)), [EXP]),
    "through jit": (lambda x: lax.tanh(jax.jit(lambda y: (y, x))(lax.exp(x))[0]), [EXP]),
    "into remat": (lambda x: jax.checkpoint(lax.tanh)(lax.exp(x)), [EXP]),
    "out of remat": (lambda x: lax.tanh(jax.checkpoint(lax.exp)(x)), [EXP]),
    "into a branch": (
        lambda x: lax.cond(x[0] > 0, lax.tanh, lambda y: y, lax.exp(x)),
        [EXP],
    ),
    "branches that agree": (
        lambda x: lax.tanh(lax.cond(x[0] > 0, lambda y: lax.exp(y), lambda y: lax.exp(y + 1), x)),
        [EXP],
    ),
    "branches that disagree": (
        lambda x: lax.tanh(lax.cond(x[0] > 0, lambda y: lax.exp(y), lambda y: y, x)),
        [{}],
    ),
    "constant of a loop": (
        lambda x: (lambda y: lax.fori_loop(0, 2, lambda i, c: c + lax.tanh(y), x))(lax.exp(x)),
        [EXP],
    ),
    "carry that is handed on": (
        lambda x: lax.scan(
            lambda c, _: ((c[0], c[1] + lax.tanh(c[0])), None), (lax.exp(x), x), None, length=2
        )[0][1],
        [EXP],
    ),
    "carry that changes": (
        lambda x: lax.scan(lambda c, _: (lax.tanh(c), None), lax.exp(x), None, length=2)[0],
        [{}],
    ),
    "slices of a scan": (
        lambda x: lax.scan(lambda c, r: (c, lax.tanh(r)), 0, lax.exp(x))[1],
        [{}],
    ),
    "out of a loop that changes it": (
        lambda x: lax.tanh(lax.fori_loop(0, 2, lambda i, c: lax.exp(c), x)),
        [{}],
    ),
    "custom_jvp": (lambda x: lax.tanh(_custom(x)), [EXP]),
    "two jits deep": (lambda x: lax.tanh(jax.jit(jax.jit(lax.exp))(x)), [EXP]),
}


@jax.custom_jvp
def _custom(x):
    return lax.exp(x)


_custom.defjvp(lambda p, t: (_custom(*p), t[0]))
MODES = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])


@pytest.mark.parametrize("name", PROGRAMS)
@MODES
def test_metadata(name, mode):
    fn, expected = PROGRAMS[name]
    assert marks(fn, X, mode=mode) == expected


def gradient(fn):
    return jax.grad(lambda x: sum(map(jnp.sum, jax.tree.leaves(fn(x)))))


# In the derivatives of these another function computes the value: a rule, or jit's own derivative.
UNKNOWN_IN_DERIVATIVES = ("custom_jvp", "through jit")
TRANSFORMS = {
    "grad": gradient,
    "jit of grad": lambda fn: jax.jit(gradient(fn)),
    "vmap": lambda fn: lambda x: jax.vmap(fn)(jnp.stack([x, x])),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in UNKNOWN_IN_DERIVATIVES])
def test_inside_of_a_transformation(name, transform):
    fn, expected = PROGRAMS[name]
    assert marks(TRANSFORMS[transform](fn), X) == expected


def test_one_block_with_it_and_without():
    """They are told apart; equal ones are not asked about again."""
    block = jax.jit(lambda x: lax.tanh(x))
    fn = lambda x: (block(x * 2), block(lax.exp(x)), block(x * 3), block(lax.exp(x)))  # noqa: E731
    assert marks(fn, X) == [{}, EXP]


def test_a_block_that_the_handler_treats_by_metadata():
    block = jax.jit(lambda x: lax.sin(x))

    def handler(call, x, **params):
        if call.op_name == "exp":
            return call.annotate(call.proceed(x, **params), mark=1)
        return x if call.metadata(x) else NotImplemented

    fn = lambda x: (block(x), block(lax.exp(x)))  # noqa: E731
    out = jax.jit(tap(fn, handler, "primitive:exp", "primitive:sin"))(X)
    assert_same(out, (jnp.sin(X), jnp.exp(X)))


def test_later_replaces_earlier_under_the_same_name():
    found = []

    def handler(call, x, **params):
        found.append(dict(call.metadata(x)))
        return call.annotate(call.proceed(x, **params), last=call.op_name, **{call.op_name: 1})

    tap(lambda x: lax.sin(lax.exp(x)), handler, "primitive:exp", "primitive:sin")(X)
    assert found == [{}, {"last": "exp", "exp": 1}]


def test_annotate_returns_the_value_and_can_be_read_at_once():
    def handler(call, x, **params):
        assert call.annotate(x, a=1) is x
        assert call.annotate(x, b=2) is x
        assert call.metadata(x) == {"a": 1, "b": 2}
        return NotImplemented

    tap(lax.exp, handler, "primitive:exp")(X)


def test_unhashable_metadata():
    def handler(call, x, **params):
        return call.annotate(x, bad=[1])

    with pytest.raises(TypeError, match=r"bad=\[1\], which can't be hashed"):
        tap(lax.exp, handler, "primitive:exp")(X)


def test_it_does_not_outlive_the_call():
    found = []

    def handler(call, x, **params):
        found.append(dict(call.metadata(x)))
        call.annotate(x, seen=True)
        return NotImplemented

    fn = tap(lambda x: (lax.exp(x), lax.exp(x)), handler, "primitive:exp")
    fn(X), fn(X)
    assert found == [{}, {"seen": True}] * 2


@pytest.mark.slow
def test_function_level():
    found = []

    def handler(call, x, **kwargs):
        if call.op_name == "softmax":
            return call.annotate(call.proceed(x, **kwargs), probabilities=True)
        found.append(dict(call.metadata(x)))
        return NotImplemented

    fn = tap(lambda x: jax.nn.gelu(jax.nn.softmax(x)), handler, "jax.nn.softmax", "jax.nn.gelu")
    fn(X), jax.jit(fn)(X)
    assert found == [{"probabilities": True}] * 2


def test_one_of_several_results():
    found = []

    def handler(call, x, **params):
        if call.op_name == "top_k":
            values, indices = call.proceed(x, **params)
            return [call.annotate(values, which="values"), indices]
        found.append(dict(call.metadata(x)))
        return NotImplemented

    fn = tap(
        lambda x: (lax.exp(lax.top_k(x, 2)[0]), lax.population_count(lax.top_k(x, 2)[1])),
        handler,
        "primitive:top_k",
        "primitive:exp",
        "primitive:population_count",
    )
    fn(X)
    assert found == [{"which": "values"}, {}]
