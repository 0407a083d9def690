"""grad, vmap and their like inside of the wrapped function: handlers see the program itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtap_testkit.tap_helpers import Log, assert_close, ids_of, stablehlo, tap, times

pytestmark = pytest.mark.sample(2)

X = jnp.linspace(-1, 1, 4)
EXP = ("primitive:exp",)
DOT = ("primitive:dot_general",)


def exps(x):
    return jnp.sum(lax.exp(lax.exp(x) * 2))


TRANSFORMS = {
    "grad": lambda f: jax.grad(f),
    "value_and_grad": lambda f: jax.value_and_grad(f),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](jnp.float32(1)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "hessian": lambda f: jax.hessian(f),
    "jacfwd": lambda f: jax.jacfwd(f),
    "jacrev": lambda f: jax.jacrev(f),
    "grad of grad": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x))),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x])),
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x])),
    "grad of vmap": lambda f: (
        lambda x: jax.grad(lambda x: jnp.sum(jax.vmap(f)(jnp.stack([x, x]))))(x)
    ),
    "vmap of vmap": lambda f: lambda x: jax.vmap(jax.vmap(f))(jnp.ones((2, 2, 4))),
    "grad of remat": lambda f: jax.grad(jax.checkpoint(f)),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "jit of vmap": lambda f: lambda x: jax.jit(jax.vmap(f))(jnp.stack([x, x])),
    "linear_transpose": lambda f: (
        lambda x: jax.linear_transpose(lambda y: y * f(x), x)(jnp.ones_like(x))
    ),
}
NAMES = pytest.mark.parametrize("name", TRANSFORMS)


@NAMES
def test_program_under_a_recorder(name):
    fn = TRANSFORMS[name](exps)
    assert stablehlo(tap(fn, Log(), *EXP), X) == stablehlo(fn, X)


@NAMES
def test_forward_operations_are_shown_once(name):
    assert ids_of(TRANSFORMS[name](exps), X, targets=EXP) == ["exp:0", "exp:1"]


@NAMES
def test_the_same_again_once_all_is_cached(name):
    fn = TRANSFORMS[name](exps)
    ids_of(fn, X, targets=EXP)
    jax.eval_shape(fn, X)
    assert ids_of(fn, X, targets=EXP) == ["exp:0", "exp:1"]


@NAMES
def test_ids_under_scopes(name):
    def scoped(x):
        with jax.named_scope("outer"):
            x = lax.exp(x)
            with jax.named_scope("inner"):
                return jnp.sum(lax.exp(x))

    assert ids_of(TRANSFORMS[name](scoped), X, targets=EXP) == ["outer/exp:0", "outer/inner/exp:0"]


@NAMES
def test_functions_are_shown_once(name):
    def fn(x):
        return jnp.sum(jax.nn.softmax(jax.nn.gelu(x)))

    ids = ids_of(TRANSFORMS[name](fn), X, targets=("jax.nn.softmax", "jax.nn.gelu"))
    assert ids == ["gelu:0", "softmax:0"]


@NAMES
def test_replaced_before_it_is_transformed(name):
    def doubled(x):
        return jnp.sum(2 * lax.exp(2 * lax.exp(x) * 2))

    tapped = tap(TRANSFORMS[name](exps), times(2.0), *EXP)
    assert_close(jax.jit(tapped)(X), jax.jit(TRANSFORMS[name](doubled))(X), rtol=1e-4)


@NAMES
def test_function_is_replaced_before_it_is_transformed(name):
    tapped = tap(TRANSFORMS[name](lambda x: jnp.sum(jax.nn.gelu(x))), times(3.0), "jax.nn.gelu")
    expected = TRANSFORMS[name](lambda x: jnp.sum(3 * jax.nn.gelu(x)))
    assert_close(jax.jit(tapped)(X), jax.jit(expected)(X), rtol=1e-4)


@NAMES
def test_in_a_nested_jit_under_two_scopes(name):
    block = jax.jit(TRANSFORMS[name](exps))

    def fn(x):
        with jax.named_scope("a"):
            first = block(x)
        with jax.named_scope("b"):
            return first, block(x)

    assert ids_of(fn, X, targets=EXP) == ["a/exp:0", "a/exp:1", "b/exp:0", "b/exp:1"]


@NAMES
def test_reading_operands(name):
    """Constants and literals among them too."""

    def fn(x):
        return jnp.sum(lax.add(lax.exp(x), lax.exp(2.0)) * lax.mul(3.0, 2.0))

    log = Log()
    tapped = tap(TRANSFORMS[name](fn), log, "primitive:exp", "primitive:mul", "primitive:add")
    jax.eval_shape(tapped, X)
    assert len(log.operands) >= 4


FORMS = {
    "jit": lambda f, x: jax.jit(f)(x),
    "scan": lambda f, x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "remat": lambda f, x: jax.checkpoint(f)(x),
    "cond": lambda f, x: lax.cond(x[0] < 9, f, lambda x: x, x),
    "fori": lambda f, x: lax.fori_loop(0, 2, lambda i, c: f(c), x),
    "vmap": lambda f, x: jax.vmap(f)(x),
    "custom_jvp": lambda f, x: _custom_jvp(f)(x),
    "custom_vjp": lambda f, x: _custom_vjp(f)(x),
}


def _custom_jvp(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda p, t: (f(*p), 3 * t[0]))
    return g


def _custom_vjp(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: (f(x), x), lambda x, ct: (3 * ct,))
    return g


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inside", [True, False])
def test_gradient_with_forms_between(form, inside):
    def loss(x):
        return jnp.sum(FORMS[form](lambda y: lax.exp(-y), x))

    def expected(x):
        return jnp.sum(FORMS[form](lambda y: lax.exp(-y) * 2, x))

    wrapped = tap(jax.grad(loss), times(2.0), *EXP)
    if not inside:
        wrapped = jax.grad(tap(loss, times(2.0), *EXP))
    assert_close(jax.jit(wrapped)(X), jax.grad(expected)(X), rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_gradient_in_the_body_of(form):
    def body(f):
        return lambda y: jax.grad(lambda y: jnp.sum(f(y)))(y)

    def fn(f):
        return lambda x: FORMS[form](body(f), x)

    tapped = tap(fn(lax.exp), times(2.0), *EXP)
    assert_close(jax.jit(tapped)(X), fn(lambda y: 2 * lax.exp(y))(X), rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_batch_in_the_body_of(form):
    if form == "vmap":
        body = lambda f: lambda y: jnp.sum(jax.vmap(f)(y[None]))  # noqa: E731
    else:
        body = lambda f: lambda y: jax.vmap(f)(y)  # noqa: E731

    def fn(f):
        return lambda x: FORMS[form](body(f), x)

    tapped = tap(fn(lax.exp), times(2.0), *EXP)
    assert_close(jax.jit(tapped)(-X), fn(lambda y: 2 * lax.exp(y))(-X), rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_ids_are_unique_where_some_is_transformed_and_some_is_not(form):
    """Before, inside and after; the rules of custom functions count with the functions."""

    def body(x):
        y = lax.exp(x) if x.ndim == 0 else jax.vmap(lax.exp)(lax.exp(-x))
        return lax.exp(-y)

    def fn(x):
        return lax.exp(FORMS[form](body, lax.exp(x)))

    ids = ids_of(fn, X, targets=EXP)
    assert len(set(ids)) == len(ids), ids


@pytest.mark.parametrize("sub", [lax.exp, jnp.exp], ids=["lax", "numpy"])
def test_ids_count_in_order(sub):
    """Whether the operation is a primitive or the small jitted function of numpy."""

    def fn(x):
        return sub(jax.vmap(sub)(sub(x)))

    assert sorted(ids_of(fn, X, targets=EXP)) == ["exp:0", "exp:1", "exp:2"]


@pytest.mark.parametrize("sub", [lax.exp, jnp.exp], ids=["lax", "numpy"])
def test_two_gradients_are_two(sub):
    def fn(x):
        return jax.grad(lambda x: jnp.sum(sub(x)))(x) + jax.grad(lambda x: jnp.sum(sub(x)))(x)

    assert ids_of(fn, X, targets=EXP) == ["exp:0", "exp:1"]


def test_ids_in_scan_do_not_depend_on_a_gradient_in_it():
    def fn(transform):
        def step(c, r):
            return transform(lambda c: lax.exp(c) * r)(c), None

        return lambda x: lax.scan(step, jnp.float32(0), x)[0]

    plain = ids_of(fn(lambda f: f), X, targets=EXP)
    assert ids_of(fn(jax.grad), X, targets=EXP) == plain


def test_an_operation_of_the_backward_rule_is_not_shown():
    log = Log()
    tapped = tap(jax.grad(lambda x, w: jnp.sum(x @ w)), log, *DOT)
    tapped(jnp.ones((3, 4)), jnp.ones((4, 5)))
    assert log.ids == ["dot_general:0"]  # two with its transpose


def test_operations_of_a_custom_backward_rule_are_not_shown_from_outside():
    @jax.custom_vjp
    def fn(x):
        return lax.exp(x)

    fn.defvjp(lambda x: (lax.exp(x), x), lambda x, ct: (lax.tanh(x) * ct,))
    log = Log()
    jax.grad(tap(fn, log, "primitive:tanh"))(1.0)
    assert log.ids == []


def test_derivative_rule_of_a_replaced_operation_is_that_of_its_replacement():
    @jax.custom_vjp
    def ste(x):
        return jnp.round(x)

    ste.defvjp(lambda x: (jnp.round(x), None), lambda _, ct: (ct,))

    def handler(call, a, b, **params):
        return call.proceed(ste(a), ste(b), **params)

    a, b = jnp.array([[0.4, 1.6]]), jnp.array([[2.2], [-0.7]])
    grads = jax.jit(tap(jax.grad(lambda a, b: (a @ b)[0, 0], (0, 1)), handler, *DOT))(a, b)
    assert_close(grads, (jnp.array([[2.0, -1.0]]), jnp.array([[0.0], [2.0]])))


def test_a_block_differentiated_and_not():
    block = jax.jit(lambda x: jnp.sum(lax.exp(x)))

    def fn(x):
        return block(x) + jnp.sum(jax.grad(block)(x))

    assert len(ids_of(fn, X, targets=EXP)) == 2  # one program, asked about for each of its ids
    tapped = tap(fn, times(2.0), *EXP)
    assert_close(tapped(X), 4 * jnp.sum(jnp.exp(X)), rtol=1e-5)


def test_second_order():
    tapped = tap(jax.hessian(lambda x: jnp.sum(lax.exp(x))), times(2.0), *EXP)
    assert_close(jax.jit(tapped)(X), jnp.diag(2 * jnp.exp(X)), rtol=1e-5)


@pytest.mark.slow
def test_training_step():
    """A loss, its gradient and an update in one wrapped function, with a scan over layers."""

    def loss(params, x):
        h = lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, params["layers"])[0]
        return jnp.mean((h @ params["head"]) ** 2)

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {"layers": jnp.ones((3, 4, 4)) / 4, "head": jnp.ones((4, 2))}
    x = jnp.ones((2, 4)) / 2
    log = Log()
    assert_close(jax.jit(tap(step, log, *DOT))(params, x), step(params, x))
    assert log.ids == ["scan(<lambda>)/dot_general:0", "dot_general:0"]
    assert [log.operands[i][1].provenance for i in range(2)] == [
        "args[0]['layers']",
        "args[0]['head']",
    ]


@pytest.mark.slow
def test_per_example_gradients_with_a_replaced_product():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    def plain(w, x):
        return jnp.sum(jnp.tanh(2 * (x @ w)))

    def examples(f):
        return lambda w, xs: jax.vmap(jax.grad(f), (None, 0))(w, xs)

    w, xs = jnp.ones((4, 3)) / 3, jnp.linspace(0, 1, 8).reshape(2, 4)
    assert_close(tap(examples(loss), times(2.0), *DOT)(w, xs), examples(plain)(w, xs), rtol=1e-5)


def test_custom_vmap_rule_inside():
    @jax.custom_batching.custom_vmap
    def fn(x):
        return lax.exp(x)

    fn.def_vmap(lambda n, batched, x: (lax.exp(x) + 100, batched[0]))
    tapped = tap(lambda x: jax.vmap(fn)(x), times(2.0), *EXP)
    assert_close(jax.jit(tapped)(X), 2 * jnp.exp(X) + 100, rtol=1e-6)


def test_custom_vmap_rule_outside():
    @jax.custom_batching.custom_vmap
    def fn(x):
        return lax.exp(x)

    fn.def_vmap(lambda n, batched, x: (lax.exp(x) + 100, batched[0]))
    tapped = jax.vmap(tap(lambda x: fn(x), times(2.0), *EXP))
    assert_close(jax.jit(tapped)(X), 2 * jnp.exp(X) + 100, rtol=1e-6)


@pytest.mark.parametrize("spmd", [None, "i"])
def test_collectives_over_a_mapped_axis(spmd):
    def fn(x):
        return jax.vmap(lambda r: lax.exp(r) / lax.psum(lax.exp(r), "i"), axis_name="i")(x)

    log = Log()
    tapped = tap(fn, log, "primitive:exp", "primitive:psum")
    np.testing.assert_allclose(jax.jit(tapped)(X), jax.nn.softmax(X), rtol=1e-6)
    assert sorted(log.ids) == ["exp:0", "exp:1", "psum:0"]


def test_nothing_of_ours_is_left_in_the_program():
    fn = tap(jax.grad(exps), Log(), *EXP)
    text = jax.jit(fn).lower(X).as_text(debug_info=True)
    assert "jaxtap." not in text
