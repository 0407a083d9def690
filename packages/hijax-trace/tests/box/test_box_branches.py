"""Boxes that branches and loops write: in loops that are differentiated, and under vmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hijax_trace import Box

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)


def branch(box, which, x):
    """Return one of two functions of ``x``, and let it write to the Box."""

    def largest(x):
        y = jnp.sin(x) * 1.5
        box.set(jnp.maximum(box.get(), lax.stop_gradient(jnp.abs(y).max())))
        return y

    def count(x):
        box.set(box.get() + 1)
        return x * x

    return lax.cond(which, largest, count, x)


def loop(wrap, by_value=False):
    """Return a loop of three steps, which returns its value and what the Box has at last."""

    def run(x, seen):
        box = Box(seen, differentiated=False)

        def body(h, i):
            which = h.sum() > -1 if by_value else i % 2 == 0
            return branch(box, which, h), h.sum()

        h, sums = lax.scan(wrap(body), x, jnp.arange(3))
        return jnp.sum(h**2) + sums.sum(), box.get()

    return run


def by_hand(x, seen):
    """The same without a loop, a branch or a Box."""
    sums = 0.0
    for i in range(3):
        sums += x.sum()
        x = x * x if i == 1 else jnp.sin(x) * 1.5
        seen = seen + 1 if i == 1 else jnp.maximum(seen, lax.stop_gradient(jnp.abs(x).max()))
    return jnp.sum(x**2) + sums, seen


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5), found, expected)


WRAPS = {
    "itself": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "remat with a policy": lambda f: jax.checkpoint(
        f, policy=jax.checkpoint_policies.dots_saveable
    ),
}
grad = lambda f: jax.value_and_grad(f, has_aux=True)  # noqa: E731


@pytest.mark.sample(2)
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_branch_in_a_loop_that_is_differentiated(wrap):
    program, xs, seen = loop(WRAPS[wrap]), jnp.stack([X, 2 * X]), jnp.array([0.0, 0.5])

    @jax.jit
    def run(x, s):
        expected = grad(by_hand)(x, s)
        found = grad(program)(x, s), grad(jax.jit(program))(x, s)
        along = jax.jvp(lambda x: program(x, s)[0], (x,), (x,))[1]
        mapped = jax.vmap(grad(program))(xs, seen), jax.vmap(grad(by_hand))(xs, seen)
        return expected, found, along, mapped

    expected, found, along, mapped = run(X, 0.0)
    close(found, (expected, expected))
    close(along, jnp.sum(expected[1] * X))
    close(*mapped)
    close(grad(program)(X, 0.0), expected)


def test_a_branch_that_depends_on_what_is_differentiated():
    found = jax.jit(grad(loop(lambda f: f, by_value=True)))(X, 0.0)
    h, seen, slopes = X, 0.0, jnp.ones_like(X)
    total, before = 0.0, []
    for _ in range(3):
        total, which = total + h.sum(), h.sum() > -1
        before.append(slopes)
        slopes = slopes * (1.5 * jnp.cos(h) if which else 2 * h)
        h = 1.5 * jnp.sin(h) if which else h * h
        seen = max(seen, jnp.abs(h).max()) if which else seen + 1
    close(found, ((total + jnp.sum(h**2), seen), sum(before) + 2 * h * slopes))


def test_a_condition_for_each_example_and_a_box_for_each():
    def one(x):
        box = Box(jnp.float32(0), differentiated=False)
        return branch(box, x.sum() > 0, x).sum(), box.get()

    (values, seen), slopes = jax.jit(jax.vmap(grad(one)))(X)
    which = np.asarray(X.sum(1)) > 0
    y = 1.5 * np.sin(X)
    close(values, np.where(which, y.sum(1), (X**2).sum(1)))
    close(seen, np.where(which, np.abs(y).max(1), 1))
    close(slopes, np.where(which[:, None], 1.5 * np.cos(X), 2 * X))


def test_a_box_that_examples_share():
    """One condition for all writes once. With one for each they would leave other values."""
    box = Box(jnp.float32(0), differentiated=False)
    doubled = jax.vmap(lambda x: lax.cond(box.get() < 1, lambda x: 2 * x, lambda x: x, x))
    close(doubled(X), 2 * X)

    def counted(x, which):
        def write(x):
            box.set(box.get() + 1)
            return 2 * x

        return lax.cond(which, write, lambda x: x, x)

    close(jax.jit(jax.vmap(counted, (0, None)))(X, True), 2 * X)
    close(jax.vmap(counted, (0, None))(X, False), X)
    assert box.get() == 1
    with pytest.raises(TypeError, match=r"written alike for all of them.*condition"):
        jax.vmap(counted)(X, X.sum(1) > 0)


def test_a_loop_of_unknown_length_beside_what_is_differentiated():
    """Its result has no derivative, but JAX takes one of its body before it finds that."""

    def program(w, seen):
        box = Box(seen, differentiated=False)

        def step(state):
            i, h = state
            h = jnp.tanh(h @ w)
            box.set(jnp.maximum(box.get(), lax.stop_gradient(jnp.abs(h).max())) + 1)
            return i + 1, h

        _, h = lax.while_loop(lambda state: state[0] < 3, step, (0, X[:, :3]))
        return jnp.sum(jnp.sin(lax.stop_gradient(h) @ w)), box.get()

    def by_hand(w, seen):
        h = X[:, :3]
        for _ in range(3):
            h = lax.stop_gradient(jnp.tanh(h @ w))
            seen = jnp.maximum(seen, jnp.abs(h).max()) + 1
        return jnp.sum(jnp.sin(h @ w)), seen

    w = jnp.linspace(-1.0, 1.5, 9).reshape(3, 3)
    expected = jax.jit(grad(by_hand))(w, 0.0)
    close(grad(program)(w, 0.0), expected)
    close(jax.jit(grad(program))(w, 0.0), expected)
    close(jax.jit(grad(jax.jit(program)))(w, 0.0), expected)
    along = jax.jvp(lambda w: program(w, 0.0)[0], (w,), (w,))[1]
    close(along, jnp.sum(expected[1] * w))
    value, linear, seen = jax.linearize(lambda w: program(w, 0.0), w, has_aux=True)
    close((value, seen), expected[0])
    close(linear(w), along)
