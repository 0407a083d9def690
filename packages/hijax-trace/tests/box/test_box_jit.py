"""hijax_trace.jit: changes of type, options, nesting, and what it costs in traces."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hijax_trace as ht
from hijax_trace import Box
from jaxtap_testkit.hijax_samples import Quant, dequantize, quantize

X = np.array([1.0, 2.0, 3.0], np.float32)


def grow(box, x):
    """None, then x, then a list that gets longer."""
    held = box.get()
    box.set(x if held is None else [*(held if isinstance(held, list) else [held]), x])


def floats(value):
    return jax.tree.map(float, value)


def test_a_change_of_type():
    box = Box(None)
    f = ht.jit(grow)
    f(box, 1.0)
    assert floats(box.get()) == 1.0
    f(box, 2.0)
    assert floats(box.get()) == [1.0, 2.0]
    f(box, 3.0)
    assert floats(box.get()) == [1.0, 2.0, 3.0]


def test_each_type_is_traced_once():
    traced = []

    @ht.jit
    def f(box, x):
        traced.append(x)
        grow(box, x)

    for _ in range(2):
        box = Box(None)
        for x in (1.0, 2.0, 3.0):
            f(box, x)
    assert len(traced) == 3


def test_shape_and_dtype_may_change():
    box = Box(X)
    ht.jit(lambda box: box.set(box.get()[:2].astype(jnp.int32)))(box)
    assert box.get().dtype == np.int32
    assert box.get().shape == (2,)


def test_a_box_closed_over():
    traced = []
    box, other = Box(None), Box(None)

    @ht.jit
    def f():
        traced.append(1)
        held = box.get()
        if held is None:
            box.set(0)
        elif isinstance(held, dict):
            box.set({**held, "a": 5})
            other.set(3)
        else:
            box.set(held + 1)

    f(), f(), f(), f()
    assert box.get() == 3
    assert other.get() is None
    assert len(traced) == 2
    box.set({"b": 3})
    f()
    assert floats(box.get()) == {"a": 5, "b": 3}
    assert other.get() == 3


def test_the_new_contents_are_seen_at_once():
    box = Box(None)

    @ht.jit
    def f(x):
        box.set(x)
        box.set([box.get(), box.get() * 2])
        return box.get()[1]

    assert f(3.0) == 6.0
    assert floats(box.get()) == [3.0, 6.0]


def test_there_and_back_is_no_change():
    box = Box(1.0)

    @ht.jit
    def f(box):
        box.set([box.get(), 5.0])
        box.set(sum(box.get()))

    traced = f.trace(box)
    assert ht.mut_types(traced) == {}
    f(box)
    assert box.get() == 6.0


def test_mut_types():
    @ht.jit
    def f(boxes, *, extra):
        boxes["a"].set([boxes["a"].get()] * 2)
        boxes["b"].set(boxes["b"].get() + 1)
        extra.set(X)
        closed.set(None)

    closed = Box(1)
    boxes = {"a": Box(1.0), "b": Box(2.0)}
    traced = f.trace(boxes, extra=Box(None))
    expected = {
        "args[0]['a']": Box([1.0, 1.0]).type,
        "kwargs['extra']": Box(X).type,
        "closed over[0]": Box(None).type,
    }
    assert ht.mut_types(traced) == expected
    assert ht.mut_types(traced.jaxpr) == expected
    assert repr(expected["args[0]['a']"]) == "Box([float32[], float32[]])"
    assert ht.mut_types(jax.make_jaxpr(jnp.sin)(1.0)) == {}
    assert closed.get() == 1  # tracing writes nothing


def test_nested():
    box = Box([])

    @ht.jit
    def inner(x):
        box.set([*box.get(), x])

    @ht.jit
    def outer():
        inner(1.0)
        inner(2.0)
        return sum(box.get())

    assert outer() == 3.0
    assert floats(box.get()) == [1.0, 2.0]
    assert outer() == 6.0
    assert len(box.get()) == 4


def test_nested_with_a_box_of_the_outer():
    @ht.jit
    def f(x):
        box = Box()
        box.set(x + 1)

        @ht.jit
        def g():
            box.set([x, x])
            box.set([x, x, x])

        g()
        y, z, w = box.get()
        box.set([x])
        g()
        return [*box.get(), y, z, w]

    assert floats(f(1.0)) == [1.0] * 6


def test_nested_with_a_box_passed_on():
    @ht.jit
    def inner(box, x):
        grow(box, x)

    @ht.jit
    def outer(box):
        inner(box, 1.0)
        inner(box, 2.0)

    box = Box(None)
    outer(box)
    assert floats(box.get()) == [1.0, 2.0]


def test_an_inner_function_that_was_compiled_before():
    box = Box(0.0)
    inner = ht.jit(lambda x: box.set(box.get() + x))
    inner(1.0)

    @ht.jit
    def outer():
        box.set([box.get()])
        box.set(box.get()[0] * 10)
        inner(1.0)

    outer()
    assert box.get() == 11.0
    box.set([1.0])
    with pytest.raises(TypeError):
        inner(1.0)  # a list and a number: it was traced again
    outer_again = ht.jit(lambda: (box.set(2.0), inner(1.0)))
    outer_again()
    assert box.get() == 3.0


def test_aliases():
    box = Box(1.0)

    @ht.jit
    def f(a, b):
        a.set(a.get() + 1)
        b.set([b.get(), a.get()])
        return a is b, a.get()

    _, held = f(box, box)
    assert floats(held) == [2.0, 2.0]
    assert floats(box.get()) == [2.0, 2.0]
    one, two = Box(1.0), Box(5.0)
    f(one, two)
    assert one.get() == 2.0
    assert floats(two.get()) == [5.0, 2.0]


def test_a_box_closed_over_and_passed():
    box, other = Box(1.0), Box(100.0)
    traced = []

    @ht.jit
    def f(passed):
        traced.append(1)
        box.set(box.get() + 1)
        passed.set(passed.get() * 10)

    f(box)
    assert box.get() == 20.0
    f(other)
    assert (box.get(), other.get()) == (21.0, 1000.0)
    f(box)
    f(other)
    assert (box.get(), other.get()) == (221.0, 10000.0)
    f(box)
    f(other)
    assert len(traced) <= 4


def test_boxes_in_the_result():
    kept = Box(7.0)

    @ht.jit
    def f(box, x):
        box.set([x])
        new = Box({"x": x})
        return box, new, [new, kept], x

    box = Box(1.0)
    same, new, (again, also_kept), x = f(box, 2.0)
    assert same is box
    assert again is new
    assert also_kept is kept
    assert floats(new.get()) == {"x": 2.0}
    assert floats(box.get()) == [2.0]
    assert x == 2.0
    assert f(box, 3.0)[1] is not new


def test_a_loop_that_updates_after_a_change_of_type():
    box = Box(None)

    @ht.jit
    def f(xs):
        if box.get() is None:
            box.set(jnp.zeros(()))

        def body(c, x):
            box.set(jnp.maximum(box.get(), x))
            return c, box.get()

        return lax.scan(body, 0, xs)[1]

    np.testing.assert_allclose(f(X), X)
    f(X - 5)
    assert box.get() == 3.0
    box.set(None)
    f(X - 5)
    assert box.get() == 0.0


def test_a_scan_body_that_jax_has_traced_before():
    box = Box(1.0)

    def body(c, _):  # one function: JAX keeps its trace
        box.set(jax.tree.map(lambda x: x + 1, box.get()))
        return c, None

    f = ht.jit(lambda: lax.scan(body, 0, None, length=2)[0])
    f()
    assert box.get() == 3.0
    box.set([1.0])
    box.set(10.0)  # other references
    f()
    assert box.get() == 12.0


def test_under_grad():
    box = Box(None)

    @ht.jit
    def f(x):
        y = x * x
        box.set([lax.stop_gradient(y)])
        return y

    assert jax.grad(f)(3.0) == 6.0
    assert floats(box.get()) == [9.0]
    assert jax.grad(f)(4.0) == 8.0
    assert floats(box.get()) == [16.0]
    assert jax.value_and_grad(f)(5.0) == (25.0, 10.0)
    assert floats(box.get()) == [25.0]


@pytest.mark.slow
def test_under_grad_with_a_loop_after_the_change():
    box = Box(None)

    @ht.jit
    def f(x):
        if box.get() is None:
            box.set(jnp.zeros(()))

        def body(c, _):
            box.set(box.get() + lax.stop_gradient(c))
            return c * x, None

        y = lax.scan(body, x, None, length=3)[0]
        return y * box.get()

    # The gradient takes what the Box holds for a constant: 2 + 4 + 8.
    assert jax.grad(f)(2.0) == 4 * 2.0**3 * 14
    assert box.get() == 14.0
    assert jax.grad(f)(2.0) == 4 * 2.0**3 * 28


def test_a_missing_stop_gradient_in_a_loop_after_the_change():
    box = Box(None)

    @ht.jit
    def f(x):
        box.set(0.0)
        lax.scan(lambda c, _: (box.set(box.get() + c), (c, None))[1], x, None, length=3)
        return x

    with pytest.raises(TypeError, match="stop_gradient"):
        jax.grad(f)(2.0)
    f(2.0)
    assert box.get() == 6.0


def test_new_contents_are_passed_on_to_plain_functions():
    box = Box(None)
    add = jax.jit(lambda box, x: box.set(box.get() + x))

    @ht.jit
    def f(x):
        box.set(x)
        add(box, 1.0)
        add(box, 2.0)
        assert jax.tree.map(lambda leaf: leaf, box) is box
        lax.cond(x > 0, lambda: box.set(box.get() * 10), lambda: None)
        return box.get()

    assert f(1.0) == 40.0
    assert box.get() == 40.0
    assert f(-3.0) == 0.0


def test_remat_and_while_after_the_change():
    box = Box(None)

    @ht.jit
    def f(x):
        box.set({"n": x})
        scaled = jax.checkpoint(lambda y: y * box.get()["n"])
        body = lambda i: (box.set({"n": box.get()["n"] * 2}), i + 1)[1]  # noqa: E731
        lax.while_loop(lambda i: i < 3, body, 0)
        return scaled(x)

    assert f(2.0) == 2.0 * 16.0
    assert box.get()["n"] == 16.0


def test_grad_inside():
    box = Box(None)

    @ht.jit
    def f(x):
        def g(x):
            box.set([lax.stop_gradient(x) * 2])
            return x * x

        return jax.grad(g)(x)

    assert f(3.0) == 6.0
    assert floats(box.get()) == [6.0]


def test_under_jvp_and_vmap():
    box = Box(None)

    @ht.jit
    def f(x):
        box.set({"n": jnp.float32(7)})
        return x * 2

    np.testing.assert_allclose(jax.vmap(f)(X), 2 * X)
    assert floats(box.get()) == {"n": 7.0}
    assert jax.jvp(f, (1.0,), (1.0,)) == (2.0, 2.0)


def test_the_backward_pass_of_a_function_that_changes_types():
    box, stats = Box(0.0), Box(None)

    @jax.custom_vjp
    def through(box, x):
        return x

    through.defvjp(lambda box, x: (x, box), lambda box, g: (box.set(g), (None, g))[1])

    @ht.jit
    def f(box, x):
        stats.set(lax.stop_gradient(x))
        return 2 * through(box, 3 * x)

    assert jax.grad(f, argnums=1)(box, 1.0) == 6.0
    assert box.get() == 2.0
    assert stats.get() == 1.0


@pytest.mark.slow
def test_change_of_type_to_hi_contents():
    box = Box(None)
    matrix = np.stack([X, X + 1])

    @ht.jit
    def f(x):
        box.set({"q": quantize(x)})

    f(matrix)
    assert isinstance(box.get()["q"], Quant)
    np.testing.assert_allclose(dequantize(box.get()["q"]), matrix, rtol=1e-2)
    f(matrix)
    f(matrix[0][None])
    assert box.get()["q"].values.shape == (1, 3)


def test_it_behaves_as_jax_jit_does():
    @functools.partial(ht.jit, static_argnames="n", donate_argnums=0)
    def f(x, n=2):
        """Doc."""
        return x * n

    assert f.__name__ == "f"
    assert f.__doc__ == "Doc."
    assert "'f'" in repr(f)
    x = jnp.asarray(X)
    np.testing.assert_allclose(f(x, n=3), 3 * X)
    assert x.is_deleted()
    assert f.eval_shape(X).shape == (3,)
    assert "stablehlo" in f.lower(X).as_text()
    np.testing.assert_allclose(f.lower(X).compile()(jnp.asarray(X)), 2 * X)


def test_static_arguments():
    traced = []

    @ht.jit(static_argnums=(0,))
    def f(mode, box, x):
        traced.append(mode)
        box.set(x if mode == "set" else [x])

    box = Box(None)
    for mode, x in (("set", 1.0), ("list", 2.0), ("set", 3.0)):
        box = Box(None)
        f(mode, box, x)
        assert floats(box.get()) == (x if mode == "set" else [x])
    assert traced == ["set", "list"]


def test_shardings():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    box = Box(None)

    @ht.jit(in_shardings=(device,), out_shardings=device)
    def f(x):
        box.set([x])
        return {"y": x * 2}

    np.testing.assert_allclose(f(X)["y"], 2 * X)
    np.testing.assert_allclose(f(X)["y"], 2 * X)
    np.testing.assert_allclose(box.get()[0], X)


def test_methods():
    class Model:
        def __init__(self):
            self.box = Box(None)

        @ht.jit(static_argnums=0)
        def step(self, x):
            self.box.set(x)
            return x + 1

    model = Model()
    assert model.step(1.0) == 2.0
    assert model.box.get() == 1.0


def test_without_boxes_it_traces_as_often_as_jax_jit():
    traced = []

    @ht.jit
    def f(tree, *, y):
        traced.append(1)
        return {"sum": tree["x"] + y, "none": None}

    for _ in range(3):
        out = f({"x": X}, y=X)
    np.testing.assert_allclose(out["sum"], 2 * X)
    assert out["none"] is None
    assert len(traced) == 1
    text = f.lower({"x": X}, y=X).as_text()
    plain = jax.jit(lambda tree, *, y: {"sum": tree["x"] + y, "none": None})
    assert text.splitlines()[1:] == plain.lower({"x": X}, y=X).as_text().splitlines()[1:]


TYPES = [lambda i: None, lambda i: X * i, lambda i: {"a": X * i, "n": jnp.float32(i)}]


@pytest.mark.slow
@pytest.mark.parametrize("passed", [False, True], ids=["closed over", "passed"])
def test_types_that_come_back_are_not_traced_again(passed):
    traced, first, second = [], Box(None), Box(X)

    def total(x, *boxes):
        traced.append(1)
        leaves = jax.tree.leaves([box.get() for box in boxes or (first, second)])
        return x + sum(map(jnp.sum, leaves))

    f, counts = ht.jit(total), []
    for i in range(12):
        first.set(TYPES[i % 3](i))
        second.set(X * i if i % 2 else X[:2] * i)
        held = jax.tree.leaves((first.get(), second.get()))
        expected = 1.0 + sum(map(np.sum, held))
        actual = f(1.0, first, second) if passed else f(1.0)
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
        counts.append(len(traced))
    assert counts[5:] == [6] * 7  # three types of one, two of the other


def test_a_function_that_changes_the_type_and_back():
    """Traced once for each type, however often it changes."""
    traced, box = [], Box(jnp.float32(0))

    @ht.jit
    def step(x):
        traced.append(1)
        seen = box.get()
        box.set((seen + x, seen) if not isinstance(seen, tuple) else seen[0] - seen[1] + x)

    expected = 0.0
    for i in range(6):
        step(float(i))
        expected = (expected + i, expected) if i % 2 == 0 else expected[0] - expected[1] + i
        assert jax.tree.map(float, box.get()) == expected
    assert len(traced) == 2


def test_a_box_that_two_functions_close_over():
    traced, box = [], Box(X)

    def summed(x):
        traced.append(1)
        return x + sum(map(jnp.sum, jax.tree.leaves(box.get())))

    f, g = ht.jit(summed), ht.jit(lambda x: f(2 * summed(x)))
    for i in range(6):
        box.set(X * i if i % 2 else [X * i, X])
        total = sum(np.sum(leaf) for leaf in jax.tree.leaves(box.get()))
        np.testing.assert_allclose(
            [f(1.0), g(1.0)], [1 + total, 2 * (1 + total) + total], rtol=1e-6
        )
    assert len(traced) <= 6


@pytest.mark.slow
def test_what_programs_keep_of_old_contents():
    """Of a type that never comes back, eight at most are kept."""
    box, alive = Box(None), []
    f = ht.jit(lambda x: x + sum(map(jnp.sum, jax.tree.leaves(box.get()))))
    for i in range(20):
        box.set([jnp.ones(3)] * i)
        alive.append(weakref.ref(box._contents))
        assert f(1.0) == 1 + 3 * i
    gc.collect()
    assert sum(contents() is not None for contents in alive) <= 9


def test_clear_cache():
    traced = []
    f = ht.jit(lambda x: traced.append(1))
    f(1.0)
    f.clear_cache()
    f(1.0)
    assert len(traced) == 2


def test_threads():
    from concurrent.futures import ThreadPoolExecutor

    f = ht.jit(grow)

    def work(i):
        box = Box(None)
        for x in range(4):
            f(box, float(x + i))
        return floats(box.get())

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(8)))
    assert results == [[float(x + i) for x in range(4)] for i in range(8)]


def test_an_exception_leaves_the_boxes_alone():
    box = Box(1.0)

    @ht.jit(static_argnums=0)
    def f(bad):
        box.set([1.0, 2.0])
        if bad:
            raise KeyError("stop")

    with pytest.raises(KeyError):
        ht.jit(lambda: f(True))()
    assert box.get() == 1.0
    jitted = ht.jit(lambda: box.set(box.get() + 1))
    jitted()
    assert box.get() == 2.0


def test_without_jit():
    box, closed = Box(None), Box(1.0)

    @ht.jit
    def f(b, x):
        grow(b, x)
        closed.set([x])
        return b

    with jax.disable_jit():
        assert f(box, 1.0) is box
        f(box, 2.0)
    assert floats(box.get()) == [1.0, 2.0]
    assert floats(closed.get()) == [2.0]
