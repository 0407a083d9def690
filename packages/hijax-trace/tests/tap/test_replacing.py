"""What handlers put in place of results, under every transformation and in every body."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

from hijax_trace import TraceEngine, opaque_call
from interception_core import Interceptor, JaxtapError, TargetError
from jaxtap_testkit.tap_helpers import Log, assert_close, assert_same, tap, times

pytestmark = pytest.mark.sample(2)

X = jnp.linspace(-1, 1, 12, dtype=jnp.float32).reshape(3, 4)
W = jnp.linspace(1, -2, 16, dtype=jnp.float32).reshape(4, 4) / 3
DOT = "primitive:dot_general"
MODES = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])


@jax.custom_vjp
def ste(x):
    return jnp.round(x)


ste.defvjp(lambda x: (jnp.round(x), None), lambda _, ct: (ct,))


@jax.custom_jvp
def tripled(x):
    return 3 * x


tripled.defjvp(lambda p, t: (3 * p[0], 5 * t[0]))


def rounding(call, *args, **params):
    return ste(call.proceed(*args, **params))


def layer(x, w):
    return jnp.tanh(x @ w)


# Each program and what it is with ``f`` on the result of every matrix product.
PROGRAMS = {
    "plain": (lambda x, w: x @ w, lambda x, w, f: f(x @ w)),
    "jit": (
        lambda x, w: jax.jit(layer)(jax.jit(layer)(x, w), w),
        lambda x, w, f: jnp.tanh(f(jnp.tanh(f(x @ w)) @ w)),
    ),
    "closure": (
        lambda x, w: jax.jit(lambda x: layer(x, w))(x),
        lambda x, w, f: jnp.tanh(f(x @ w)),
    ),
    "scan": (
        lambda x, w: lax.scan(lambda c, r: (layer(c, w), c @ r), x, x[:, :4])[0],
        lambda x, w, f: functools.reduce(lambda c, _: jnp.tanh(f(c @ w)), range(3), x),
    ),
    "fori": (
        lambda x, w: lax.fori_loop(0, 2, lambda i, c: layer(c, w), x),
        lambda x, w, f: jnp.tanh(f(jnp.tanh(f(x @ w)) @ w)),
    ),
    "cond": (
        lambda x, w: lax.cond(x[0, 0] < 5, layer, lambda x, w: x, x, w),
        lambda x, w, f: jnp.tanh(f(x @ w)),
    ),
    "switch": (
        lambda x, w: lax.switch(1, [lambda x: x, lambda x: layer(x, w), lambda x: -x], x),
        lambda x, w, f: jnp.tanh(f(x @ w)),
    ),
    "remat": (
        lambda x, w: jax.checkpoint(layer)(x, w),
        lambda x, w, f: jnp.tanh(f(x @ w)),
    ),
    "remat in scan": (
        lambda x, w: lax.scan(lambda c, _: (jax.checkpoint(layer)(c, w), None), x, None, 2)[0],
        lambda x, w, f: jnp.tanh(f(jnp.tanh(f(x @ w)) @ w)),
    ),
    "vmap": (
        lambda x, w: jax.vmap(layer, (0, None))(x, w),
        lambda x, w, f: jnp.tanh(f(x @ w)),
    ),
    "vmap of jit": (
        lambda x, w: jax.vmap(jax.jit(lambda r: layer(r, w)))(x),
        lambda x, w, f: jnp.tanh(f(x @ w)),
    ),
    "scopes": (
        lambda x, w: jax.named_scope("a")(layer)(x, w),
        lambda x, w, f: jnp.tanh(f(x @ w)),
    ),
}
FORMS = pytest.mark.parametrize("name", PROGRAMS)


def loss(fn):
    return lambda x, w: jnp.sum(jnp.sin(fn(x, w)))


@FORMS
@MODES
def test_value(name, mode):
    fn, expected = PROGRAMS[name]
    result = mode(tap(fn, times(2.0), DOT))(X, W)
    if name == "scan":
        assert result.shape == X.shape
    assert_close(result, expected(X, W, lambda y: 2 * y), rtol=1e-5)


@FORMS
def test_custom_vjp_under_grad(name):
    fn, expected = PROGRAMS[name]
    grads = jax.jit(jax.grad(tap(loss(fn), rounding, DOT), (0, 1)))(X, W)
    plain = jax.jit(jax.grad(loss(lambda x, w: expected(x, w, ste)), (0, 1)))
    assert_close(grads, plain(X, W), rtol=1e-5)


@FORMS
def test_custom_vjp_under_grad_inside(name):
    fn, expected = PROGRAMS[name]
    grads = jax.jit(tap(jax.grad(loss(fn), (0, 1)), rounding, DOT))(X, W)
    plain = jax.jit(jax.grad(loss(lambda x, w: expected(x, w, ste)), (0, 1)))
    assert_close(grads, plain(X, W), rtol=1e-5)


@pytest.mark.slow
@FORMS
@pytest.mark.optimized  # to 1e-4, which the tanh of a hasty compiler is not
@pytest.mark.parametrize("inside", [False, True])
def test_custom_jvp_under_jvp(name, inside):
    fn, expected = PROGRAMS[name]

    def handler(call, *args, **params):
        return tripled(call.proceed(*args, **params))

    def jvp(f):
        return lambda x, w: jax.jvp(f, (x, w), (jnp.ones_like(x), jnp.cos(w)))

    wrapped = tap(jvp(fn), handler, DOT) if inside else jvp(tap(fn, handler, DOT))
    plain = jvp(lambda x, w: expected(x, w, tripled))
    # Where it is saturated, the slope of tanh loses digits, which ones depends on the processor.
    assert_close(jax.jit(wrapped)(X, W), jax.jit(plain)(X, W), rtol=1e-4)


@FORMS
def test_under_vmap(name):
    fn, expected = PROGRAMS[name]
    xs = jnp.stack([X, X + 1, -X])
    result = jax.jit(jax.vmap(tap(fn, rounding, DOT), (0, None)))(xs, W)
    plain = jax.jit(jax.vmap(lambda x, w: expected(x, w, ste), (0, None)))
    assert_close(result, plain(xs, W), rtol=1e-5)


@FORMS
def test_under_vmap_of_grad(name):
    fn, expected = PROGRAMS[name]
    xs = jnp.stack([X, X + 1])
    result = jax.jit(jax.vmap(jax.grad(tap(loss(fn), times(2.0), DOT)), (0, None)))(xs, W)
    plain = jax.vmap(jax.grad(loss(lambda x, w: expected(x, w, lambda y: 2 * y))), (0, None))
    assert_close(result, jax.jit(plain)(xs, W), rtol=1e-5)


@FORMS
def test_closed_over_tracer_in_the_handler(name):
    """The handler uses a value of the trace around the wrapped function."""
    fn, expected = PROGRAMS[name]

    @jax.jit
    def outer(x, w, scale):
        def handler(call, *args, **params):
            return call.proceed(*args, **params) * scale

        return tap(fn, handler, DOT)(x, w)

    result = outer(X, W, jnp.float32(2))
    assert_close(result, expected(X, W, lambda y: 2 * y), rtol=1e-5)


@FORMS
def test_gradient_by_what_the_handler_closes_over(name):
    fn, expected = PROGRAMS[name]

    def outer(scale):
        def handler(call, *args, **params):
            return call.proceed(*args, **params) * scale

        return jnp.sum(tap(fn, handler, DOT)(X, W))

    def plain(scale):
        return jnp.sum(expected(X, W, lambda y: y * scale))

    assert_close(jax.jit(jax.grad(outer))(0.7), jax.grad(plain)(0.7), rtol=1e-4)


@FORMS
def test_batch_by_what_the_handler_closes_over(name):
    fn, expected = PROGRAMS[name]

    def outer(scale):
        def handler(call, *args, **params):
            return call.proceed(*args, **params) * scale

        return tap(fn, handler, DOT)(X, W)

    scales = jnp.array([0.5, 2.0])
    plain = jnp.stack([expected(X, W, lambda y, s=s: y * s) for s in scales])
    assert_close(jax.vmap(outer)(scales), plain, rtol=1e-5)


@FORMS
def test_handler_writes_to_a_ref(name):
    """How often it is written to is how often the operation runs."""
    fn, expected = PROGRAMS[name]
    seen = []

    def spy(y):
        seen.append(None)
        return y

    expected(X, W, spy)
    count = jax.new_ref(jnp.zeros((), jnp.int32))

    def handler(call, *args, **params):
        if name.startswith("vmap"):  # a Ref without the mapped axis can't be written to there
            return NotImplemented
        count[...] += 1
        return call.proceed(*args, **params)

    jax.jit(tap(fn, handler, DOT))(X, W)
    if name == "scan":  # one more product, for the outputs
        assert count[...] == 2 * len(seen)
    elif not name.startswith("vmap"):
        assert count[...] == len(seen)


def test_handler_reads_a_ref_of_the_trace_around():
    @jax.jit
    def outer(x, w):
        ref = jax.new_ref(jnp.float32(2))

        def handler(call, *args, **params):
            ref[...] *= 2
            return call.proceed(*args, **params) * ref[...]

        fn = lambda x, w: lax.scan(lambda c, _: (c @ w, None), x, None, length=2)[0]  # noqa: E731
        return tap(fn, handler, DOT)(x, w), ref[...]

    out, last = outer(X, W)
    assert last == 8
    assert_close(out, X @ W * 4 @ W * 8, rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_closed_over_tracer_in_shard_map(check_vma):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.jit
    def outer(x, w, scale):
        def handler(call, *args, **params):
            return call.proceed(*args, **params) * scale

        body = jax.shard_map(
            lambda x, w: lax.psum(x @ w, "i"),
            mesh=mesh,
            in_specs=(P(None, "i"), P("i")),
            out_specs=P(),
            check_vma=check_vma,
        )
        return tap(body, handler, DOT)(x, w)

    assert_close(outer(X, W, 3.0), X @ W * 3, rtol=1e-5)


def test_closed_over_tracer_in_while_condition_and_body():
    @jax.jit
    def outer(x, limit, step):
        def handler(call, a, b, **params):
            return call.proceed(a, b, **params) + (limit if call.op_name == "sub" else step)

        def fn(x):
            return lax.while_loop(lambda s: lax.sub(s, 10.0) < 0, lambda s: lax.mul(s, 1.0), x)

        return tap(fn, handler, "primitive:sub", "primitive:mul")(x)

    # goes on while s - 10 + limit < 0, each time s = s + step
    assert outer(0.0, 4.0, 2.5) == 7.5


def test_closed_over_tracer_in_each_branch():
    @jax.jit
    def outer(x, a, b, which):
        def handler(call, y, **params):
            return call.proceed(y, **params) + (a if call.op_name == "exp" else b)

        fn = lambda x: lax.switch(  # noqa: E731
            which, [lax.exp, lax.tanh, lambda x: x, lambda x: lax.exp(lax.tanh(x))], x
        )
        return tap(fn, handler, "primitive:exp", "primitive:tanh")(x)

    exp, tanh = np.exp, np.tanh
    expected = [exp(0.5) + 10, tanh(0.5) + 20, 0.5, exp(tanh(0.5) + 20) + 10]
    for which, value in enumerate(expected):
        np.testing.assert_allclose(outer(0.5, 10.0, 20.0, which), value, rtol=1e-6)


def test_closed_over_tracer_in_custom_jvp_and_vjp():
    @jax.custom_jvp
    def first(x):
        return lax.exp(x)

    first.defjvp(lambda p, t: (first(*p), lax.exp(p[0]) * t[0]))

    @jax.custom_vjp
    def second(x):
        return lax.exp(x)

    second.defvjp(lambda x: (second(x), x), lambda x, ct: (lax.exp(x) * ct,))

    def outer(x, scale, fn):
        def handler(call, y, **params):
            return call.proceed(y, **params) * scale

        return tap(fn, handler, "primitive:exp")(x)

    for fn in (first, second):
        for mode in (lambda f: f, lambda f: jax.jit(f, static_argnums=2)):
            value, grad = mode(jax.value_and_grad(outer))(1.0, 3.0, fn)
            np.testing.assert_allclose(value, 3 * np.exp(1), rtol=1e-6)
            assert grad in (pytest.approx(np.exp(1)), pytest.approx(3 * np.exp(1)))


def test_closed_over_tracer_in_custom_vjp_inside_grad():
    """The rule's operations are not the program's: its own derivative is."""

    @jax.custom_vjp
    def fn(x):
        return lax.exp(x)

    fn.defvjp(lambda x: (lax.exp(x), x), lambda x, ct: (7 * ct,))

    @jax.jit
    def outer(x, scale):
        def handler(call, y, **params):
            return call.proceed(y, **params) * scale

        return tap(jax.value_and_grad(fn), handler, "primitive:exp")(x)

    value, grad = outer(1.0, 3.0)
    np.testing.assert_allclose(value, 3 * np.exp(1), rtol=1e-6)
    assert grad == 7


@pytest.mark.slow
def test_handler_of_a_function_in_scan():
    def handler(call, x, axis=-1):
        return call.proceed(x, axis=axis) * 2

    def fn(x):
        return lax.scan(lambda c, r: (jax.nn.softmax(c + r), c), x[0], x)

    def expected(x):
        return lax.scan(lambda c, r: (jax.nn.softmax(c + r) * 2, c), x[0], x)

    tapped = tap(fn, handler, "jax.nn.softmax")
    assert_close(jax.jit(tapped)(X), expected(X))
    assert_close(tapped(X), expected(X))


def test_handler_calls_other_targets():
    """Its own operations are not shown to it."""
    asked = []

    def handler(call, a, b, **params):
        asked.append(call.op_id)
        return call.proceed(a, b, **params) + lax.dot_general(a, b, **params)

    assert_close(jax.jit(tap(lambda x, w: x @ w, handler, DOT))(X, W), 2 * (X @ W))
    assert asked == ["dot_general:0"]


def test_handler_uses_jitted_and_mapped_functions():
    blocked = jax.jit(lambda a, b: jax.vmap(lambda r: lax.map(lambda c: jnp.dot(r, c), b.T))(a))

    def handler(call, a, b, **params):
        return blocked(a, b)

    fn = lambda x, w: lax.scan(lambda c, _: (c @ w, None), x, None, length=2)[0]  # noqa: E731
    assert_close(jax.jit(tap(fn, handler, DOT))(X, W), X @ W @ W, rtol=1e-5)


def test_handler_takes_a_gradient():
    def handler(call, x, **params):
        return jax.grad(lambda y: jnp.sum(call.proceed(y, **params) * 2))(x)

    assert_close(tap(lambda x: lax.exp(x), handler, "primitive:exp")(X), 2 * jnp.exp(X))


def test_handler_maps_the_original():
    def handler(call, x, w, **params):
        row = {**params, "dimension_numbers": (((0,), (0,)), ((), ()))}
        return jax.vmap(lambda r: call.proceed(r, w, **row))(x)

    for mode in (lambda f: f, jax.jit):
        assert_close(mode(tap(lambda x, w: x @ w, handler, DOT))(X, W), X @ W)


def test_handler_proceeds_with_other_arguments_and_types():
    def handler(call, x, w, **params):
        params = {**params, "preferred_element_type": jnp.dtype(jnp.int32)}
        q = jnp.round(x * 10).astype(jnp.int8)
        return call.proceed(q, w.astype(jnp.int8), **params).astype(jnp.float32) / 10

    out = jax.jit(tap(lambda x, w: x @ w, handler, DOT))(X, jnp.eye(4))
    np.testing.assert_allclose(out, np.round(np.asarray(X) * 10) / 10, rtol=1e-6)


def test_handler_of_a_function_proceeds_with_other_shapes():
    def handler(call, x, axis=-1):
        return call.proceed(jnp.concatenate([x, x]), axis=axis)[:3]

    out = jax.jit(tap(lambda x: jax.nn.softmax(x), handler, "jax.nn.softmax"))(X)
    assert_close(out, jax.nn.softmax(X))


def test_handler_does_not_proceed():
    out = jax.jit(tap(lambda x: jnp.exp(x) + 1, lambda call, x, **_: x, "primitive:exp"))(X)
    assert_close(out, X + 1)


def test_handler_proceeds_twice():
    def handler(call, x, **params):
        return call.proceed(x, **params) + call.proceed(2 * x, **params)

    assert_close(tap(jnp.exp, handler, "primitive:exp")(X), jnp.exp(X) + jnp.exp(2 * X))


def test_multiple_results_are_replaced():
    def handler(call, x, **params):
        values, indices = call.proceed(x, **params)
        return [values * 2, indices]

    values, indices = jax.jit(tap(lambda x: lax.top_k(x, 2), handler, "primitive:top_k"))(X)
    expected, places = lax.top_k(X, 2)
    assert_close((values, indices), (2 * expected, places))


def test_scan_itself_is_replaced():
    def handler(call, *args, **params):
        carry, ys = call.proceed(*args, **params)
        return [carry + 1, ys]

    fn = lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x)  # noqa: E731
    carry, ys = fn(X)
    assert_close(jax.jit(tap(fn, handler, "primitive:scan"))(X), (carry + 1, ys))


def test_scan_that_is_replaced_has_its_body_shown_neither_way():
    log = Log()

    def handler(call, *args, **params):
        log(call, *args, **params)
        return call.proceed(*args, **params) if call.op_name == "scan" else NotImplemented

    fn = lambda x: lax.scan(lambda c, r: (jnp.exp(c), r), x[0], x)  # noqa: E731
    tap(fn, handler, "primitive:scan", "primitive:exp")(X)
    assert log.names == ["scan"]


def test_weak_result_for_a_strong_one():
    out = jax.jit(tap(lambda x: lax.exp(x) * X, lambda call, x, **_: 2.0, "primitive:exp"))
    with pytest.raises(TargetError, match="float32"):
        out(X)  # shapes differ
    out = jax.jit(tap(lambda x: lax.exp(x) * 2, lambda call, x, **_: 3.0, "primitive:exp"))
    assert out(jnp.float32(1)) == 6


def test_weak_result_in_the_carry_of_scan():
    def fn(x):
        return lax.scan(lambda c, _: (lax.exp(c), None), x, None, length=2)[0]

    out = jax.jit(tap(fn, lambda call, x, **_: 3.0, "primitive:exp"))(jnp.float32(1))
    assert (out, out.dtype) == (3, jnp.float32)


def test_numpy_result():
    handler = lambda call, x, **_: np.ones((3, 4), np.float32)  # noqa: E731
    assert_same(jax.jit(tap(jnp.exp, handler, "primitive:exp"))(X), jnp.ones((3, 4)))


def test_result_of_function_with_a_pytree():
    out = jax.jit(tap(lambda x: jnp.linalg.eigh(x @ x.T), handler_pytree, "jax.numpy.linalg.eigh"))
    values, _ = out(X)
    expected = jnp.linalg.eigh(X @ X.T)
    assert_close(values, expected[0] * 2, rtol=1e-5)
    assert type(out(X)) is type(expected)


def handler_pytree(call, *args, **kwargs):
    result = call.proceed(*args, **kwargs)
    return type(result)(result[0] * 2, result[1])


# --- errors -----------------------------------------------------------------------------------

WRONG = {
    "shape": (lambda call, x, **_: x[0], r"exp:0.*must be .*float32\[3,4\].*got float32\[4\]"),
    "dtype": (
        lambda call, x, **_: x.astype(jnp.int32),
        r"exp:0.*must be .*float32\[3,4\].*got int32",
    ),
    "text": (lambda call, x, **_: "no", "exp:0.*must be an array.*got 'no'"),
    "none": (lambda call, x, **_: None, "exp:0.*must be an array.*got None"),
    "list": (lambda call, x, **_: [x], r"exp:0.*must be an array.*got "),
}
BODIES = {
    "plain": lambda x: jnp.exp(x),
    "jit": lambda x: jax.jit(lambda x: jnp.exp(x) * 2)(x),
    "scan": lambda x: lax.scan(lambda c, _: (jnp.exp(c), None), x, None, length=2)[0],
    "vmap": lambda x: jax.vmap(jnp.exp)(x),
    "grad": lambda x: jax.grad(lambda x: jnp.sum(jnp.exp(x)))(x),
}


@pytest.mark.parametrize("body", ["plain", "jit", "scan"])
@pytest.mark.parametrize("wrong", WRONG)
@MODES
def test_wrong_result_of_a_primitive(wrong, body, mode):
    handler, match = WRONG[wrong]
    tapped = tap(BODIES[body], handler, "primitive:exp")
    with pytest.raises(TargetError, match=match):
        mode(tapped)(X)
    with pytest.raises(TargetError, match=match):  # nothing of it was kept
        mode(tapped)(X)


@pytest.mark.parametrize("body", ["vmap", "grad"])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_result_inside_of_a_transformation(wrong, body):
    handler, _ = WRONG[wrong]
    with pytest.raises(TargetError, match=r"exp:0.*must be an array.*got "):
        tap(BODIES[body], handler, "primitive:exp")(X)


def test_wrong_number_of_results():
    handler = lambda call, x, **params: call.proceed(x, **params)[:1]  # noqa: E731
    with pytest.raises(TargetError, match=r"top_k:0 must return 2 results.*got 1"):
        tap(lambda x: lax.top_k(x, 2), handler, "primitive:top_k")(X)


@pytest.mark.parametrize("wrong", [lambda x: (x, x), lambda x: {"y": x}, lambda x: None])
def test_wrong_structure_of_a_function(wrong):
    handler = lambda call, x, **_: wrong(x)  # noqa: E731
    with pytest.raises(
        TargetError, match=r"softmax:0.*must be PyTreeDef.*got PyTreeDef.*same structure"
    ):
        tap(lambda x: jax.nn.softmax(x), handler, "jax.nn.softmax")(X)


def test_wrong_type_of_a_function():
    handler = lambda call, x, **_: x.astype(jnp.bfloat16)  # noqa: E731
    with pytest.raises(TargetError, match=r"softmax:0.*must be .*got bfloat16.*Convert"):
        jax.jit(tap(lambda x: jax.nn.softmax(x), handler, "jax.nn.softmax"))(X)


def test_closed_over_tracer_in_a_linear_solve():
    """Its programs take more operands, as those of loops and branches do."""

    def fn(w):
        return lax.custom_linear_solve(
            lambda y: w @ y, W[0], lambda matvec, b: jnp.exp(b), symmetric=True
        )

    @jax.jit
    def outer(w, scale):
        handler = lambda call, x, **params: call.proceed(x, **params) * scale  # noqa: E731
        return tap(fn, handler, "primitive:exp")(w)

    np.testing.assert_allclose(outer(W, 2.0), 2 * np.exp(W[0]), rtol=1e-5)


def test_closed_over_tracer_where_it_can_not_be_given_teaches():
    """A primitive that nobody knows may hold a program, and have no place for more operands."""
    held = Primitive("holds_a_program")
    held.def_abstract_eval(lambda x, program: program.out_avals[0])
    program = jax.make_jaxpr(jnp.exp)(W[0])

    @jax.jit
    def outer(w, scale):
        handler = lambda call, x, **params: call.proceed(x, **params) * scale  # noqa: E731
        return tap(lambda x: held.bind(x, program=program), handler, "primitive:exp")(w)

    with pytest.raises(JaxtapError, match=r"holds_a_program.*can't take more operands"):
        outer.trace(W[0], 2.0)


def test_programs_of_an_unknown_purpose_are_left():
    """A library's solver holds its operator, which is not what it returns."""
    solve = Primitive("solve")
    solve.multiple_results = True
    solve.def_impl(lambda w, b, program: [b / w, b])
    solve.def_abstract_eval(lambda w, b, program: [w, b])
    mlir.register_lowering(solve, mlir.lower_fun(solve.impl, multiple_results=True))
    program = jax.make_jaxpr(lambda y: jnp.exp(y))(W[0])
    asked = []

    def opaque(call, *values, **params):
        asked.append((call.op_id, len(values), params["program"] is program))
        return NotImplemented

    @jax.jit
    def outer(w, scale):
        handlers = {
            "primitive:exp": lambda call, x, **params: call.proceed(x, **params) * scale,
            "hijax_trace.opaque_call": opaque,
        }
        fn = lambda w: solve.bind(jnp.exp(w), w, program=program)[0] + jnp.exp(w)  # noqa: E731
        return TraceEngine().wrap(fn, Interceptor(handlers))(w)

    w = W[0]
    np.testing.assert_allclose(outer(w, 2.0), w / (2 * np.exp(w)) + 2 * np.exp(w), rtol=1e-5)
    assert asked == [("solve:0", 2, True)]
    with pytest.raises(TypeError, match="can't be called"):
        opaque_call(w)


@pytest.mark.parametrize("change", [{"other": 1}, None], ids=["one more", "none"])
def test_proceeding_with_other_parameters_is_refused_as_jax_does(change):
    """Also where a call of one operation may stay a call, as it has its own parameters."""

    @functools.partial(jax.jit, inline=True)
    def dot(a, b):
        return lax.dot(a, b)

    def handler(call, a, b, **params):
        return call.proceed(a, b) if change is None else call.proceed(a, b, **params, **change)

    tapped = tap(lambda x, w: jnp.sum(dot(x, w)), handler, DOT)
    with pytest.raises(TypeError, match="argument"):
        jax.jit(jax.grad(tapped))(X, W)
