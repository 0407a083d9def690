"""JAX's caches never carry a tapped trace out of its scope, nor a plain one into it."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from interception_core import Interceptor, PatchEngine

ENGINE = PatchEngine()


def scaled(factor):
    """An interceptor whose tapped products are ``factor`` times the plain ones."""

    def handler(call, *args, **kwargs):
        return call.proceed(*args, **kwargs) * jnp.float32(factor)

    return Interceptor({"jax.lax.dot_general": handler}, key=("scaled", factor))


def by_path(call, *args, **kwargs):
    factor = {"first": 2, "second": 4}.get(call.module_path.split("/")[0])
    if factor is None:
        return NotImplemented
    return call.proceed(*args, **kwargs) * jnp.float32(factor)


def _checkpoint(x, w):
    return jax.checkpoint(lambda x, w: x @ w)(x, w)


def _scan(x, w):
    return lax.scan(lambda carry, row: (carry, row @ w), 0, x)[1]


def _while(x, w):
    return lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, x @ w), (0, jnp.zeros((4, 4))))[
        1
    ]


def _cond(x, w):
    return lax.cond(x[0, 0] < 1e9, lambda x, w: x @ w, lambda x, w: x, x, w)


def _vmap(x, w):
    return jax.vmap(lambda row: row @ w)(x)


def _make_custom_vjp():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, ct: (ct @ res[1].T, res[0].T @ ct))
    return lambda x, w: product(x, w)


def _make_custom_jvp():
    @jax.custom_jvp
    def product(x, w):
        return x @ w

    product.defjvp(lambda primals, tangents: (primals[0] @ primals[1], tangents[0] @ primals[1]))
    return lambda x, w: product(x, w)


# Each makes a function of its own; what they share is what JAX shares: its functions' caches.
FORMS = {
    "matmul operator": lambda: lambda x, w: x @ w,
    "jnp.dot": lambda: lambda x, w: jnp.dot(x, w),
    "jnp.inner": lambda: lambda x, w: jnp.inner(x, w),
    "jnp.matmul": lambda: lambda x, w: jnp.matmul(x, w),
    "jnp.einsum": lambda: lambda x, w: jnp.einsum("ij,jk->ik", x, w),
    "lax.dot_general": lambda: lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ()))),
    "jitted": lambda: jax.jit(lambda x, w: jnp.tanh(x) @ w),
    "checkpoint": lambda: _checkpoint,
    "scan": lambda: _scan,
    "while": lambda: _while,
    "cond": lambda: _cond,
    "vmap": lambda: _vmap,
    "custom_vjp": _make_custom_vjp,
    "custom_jvp": _make_custom_jvp,
}
MODES = {
    "eager": (lambda fn: fn, lambda fn, i: ENGINE.wrap(fn, i)),
    "outer jit": (jax.jit, lambda fn, i: jax.jit(ENGINE.wrap(fn, i))),
    "inner jit": (lambda fn: fn, lambda fn, i: ENGINE.wrap(fn, i)),
}


@pytest.fixture
def operands():
    rng = np.random.default_rng()
    return [jnp.asarray(rng.normal(size=(4, 4)), jnp.float32) for _ in range(2)]


@pytest.fixture(params=FORMS)
def make(request):
    return FORMS[request.param]


@pytest.fixture(params=MODES)
def case(request, make):
    """A function with its plain and its tapped version, and an unrelated one of its form."""
    plain, tapped = MODES[request.param]
    fn, other = make(), make()
    if request.param == "inner jit":
        fn, other = jax.jit(fn), jax.jit(other)
    return plain(fn), lambda interceptor: tapped(fn, interceptor), plain(other)


def same(actual, expected):
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def test_float_first(case, operands):
    plain, tapped, other = case
    before, elsewhere = plain(*operands), other(*operands)
    same(tapped(scaled(2))(*operands), 2 * before)
    same(plain(*operands), before)
    same(other(*operands), elsewhere)


def test_tapped_first(case, operands):
    plain, tapped, other = case
    doubled = tapped(scaled(2))(*operands)
    before = plain(*operands)
    same(doubled, 2 * before)
    same(other(*operands), before)
    same(tapped(scaled(2))(*operands), doubled)


def test_provider_a_then_b(case, operands):
    plain, tapped, other = case
    a = tapped(scaled(2))(*operands)
    b = tapped(scaled(4))(*operands)
    again = tapped(scaled(2))(*operands)
    before = plain(*operands)
    same(a, 2 * before)
    same(b, 4 * before)
    same(again, a)
    same(other(*operands), before)


@pytest.mark.parametrize("mode", ["eager", "outer jit", "inner jit"])
def test_two_rules_on_equal_layers(make, mode, operands):
    layer = jax.jit(make()) if mode == "inner jit" else make()

    def model(x, w):
        with jax.named_scope("first"):
            first = layer(x, w)
        with jax.named_scope("second"):
            second = layer(x, w)
        return first, second, layer(x, w)

    wrapped = ENGINE.wrap(model, Interceptor({"jax.lax.dot_general": by_path}))
    if mode == "outer jit":
        model, wrapped = jax.jit(model), jax.jit(wrapped)
    for _ in range(2):
        first, second, third = wrapped(*operands)
        plain = model(*operands)[0]
        same(first, 2 * plain)
        same(second, 4 * plain)
        same(third, plain)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "while"])
def test_gradient_of_a_jitted_tapped_function(form, operands):
    """Rules that JAX evaluates when it differentiates, after the scope, are tapped as well."""
    x, w = operands
    fn = FORMS[form]()

    def loss(product):
        return lambda x: jnp.sum(product(x, w))

    plain = fn(x, w)
    value, _ = jax.value_and_grad(loss(jax.jit(ENGINE.wrap(fn, scaled(2)))))(x)
    np.testing.assert_allclose(value, 2 * np.sum(np.asarray(plain)), rtol=1e-4, atol=1e-4)
    value, _ = jax.value_and_grad(loss(ENGINE.wrap(fn, scaled(2))))(x)
    np.testing.assert_allclose(value, 2 * np.sum(np.asarray(plain)), rtol=1e-4, atol=1e-4)
    value, _ = jax.value_and_grad(loss(jax.jit(fn)))(x)
    np.testing.assert_allclose(value, np.sum(np.asarray(plain)), rtol=1e-4, atol=1e-4)


def _race(rounds, left, right, check):
    """Runs ``left(i)`` and ``right(i)`` at the same time on two threads, ``rounds`` times."""
    barrier = threading.Barrier(2)
    results = {"left": [], "right": []}

    def work(name, fn):
        for i in range(rounds):
            barrier.wait(timeout=60)
            try:
                results[name].append(fn(i))
            except BaseException as error:
                results[name].append(error)

    threads = [
        threading.Thread(target=work, args=item) for item in (("left", left), ("right", right))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert len(results["left"]) == len(results["right"]) == rounds
    for i in range(rounds):
        check(i, results["left"][i], results["right"][i])


def test_two_hundred_concurrent_cold_starts(operands):
    forms = list(FORMS.values())
    fns = [jax.jit(forms[i % len(forms)]()) for i in range(200)]

    def check(i, tapped, plain):
        same(tapped, 2 * np.asarray(plain))
        same(fns[i](*operands), plain)

    _race(
        200,
        lambda i: np.asarray(ENGINE.wrap(fns[i], scaled(2))(*operands)),
        lambda i: np.asarray(fns[i](*operands)),
        check,
    )


def test_concurrent_eager_cold_starts():
    """The functions of ``jax.numpy`` themselves, on shapes that nobody used before."""
    shapes = [(np.ones((i + 1, 3), np.float32), np.ones((3, i + 1), np.float32)) for i in range(40)]

    def run(x, w):
        return np.asarray(jnp.matmul(jnp.asarray(x), jnp.asarray(w)))

    def check(i, tapped, plain):
        same(tapped, 6 * np.ones((i + 1, i + 1)))
        same(plain, 3 * np.ones((i + 1, i + 1)))

    _race(
        40,
        lambda i: ENGINE.wrap(run, scaled(2))(*shapes[i]),
        lambda i: run(*shapes[i]),
        check,
    )


def test_two_interceptors_on_two_threads(operands):
    fns = [jax.jit(lambda x, w: jnp.tanh(x) @ w) for _ in range(25)]

    def check(i, double, quadruple):
        same(2 * double, quadruple)

    _race(
        25,
        lambda i: np.asarray(ENGINE.wrap(fns[i], scaled(2))(*operands)),
        lambda i: np.asarray(ENGINE.wrap(fns[i], scaled(4))(*operands)),
        check,
    )
