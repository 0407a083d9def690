"""A Box under each of JAX's transformations, beside the numbers it should then hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hijax_trace as ht
from hijax_trace import Box
from jaxtap_testkit.hijax_samples import Quant, dequantize, element, quantize, tup

pytestmark = pytest.mark.sample(2)

X = np.array([1.0, 2.0, 3.0], np.float32)
MATRIX = np.stack([X, X + 1])
ALL = pytest.mark.parametrize("jit", [lambda f: f, jax.jit, ht.jit], ids=["eager", "jit", "ht.jit"])
JITS = pytest.mark.parametrize("jit", [jax.jit, ht.jit], ids=["jit", "ht.jit"])


def holds(box, expected):
    """Checks values, and structure by the way."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), box.get(), expected)


def test_new_get_and_set():
    box = Box.new(1.0)
    holds(box, 1.0)
    box.set(2.0)
    holds(box, 2.0)
    assert Box().get() is None


def test_pytree_contents():
    box = Box({"a": X, "b": [1, (None, 2.0)]})
    holds(box, {"a": X, "b": [1, (None, 2.0)]})
    box.set({"a": X + 1, "b": [2, (None, 3.0)]})
    holds(box, {"a": X + 1, "b": [2, (None, 3.0)]})


def test_the_type_may_change_outside_of_traces():
    box = Box(None)
    for value in (1.0, X, {"a": X}, [], [1, 2], None):
        box.set(value)
        holds(box, value)


def test_reading_does_not_alias():
    box = Box(X)
    before = box.get()
    box.set(X + 1)
    np.testing.assert_allclose(before, X)


@pytest.mark.slow
def test_a_number_counts_as_one_wherever_it_is_read():
    """A Python number takes the dtype of what it meets, as JAX's own Box had it."""
    x = jnp.ones(2, jnp.bfloat16)

    def product(box):
        return (box.get() * x).dtype.name

    def step(carry, _):
        box.set(box.get() + 1.0)
        return carry * box.get(), None

    def loss(x):
        box.set(3.0)
        return (x * box.get()).sum()

    box = Box(2.0)
    assert product(box) == jax.jit(lambda x: box.get() * x)(x).dtype.name == "bfloat16"
    assert jax.jit(lambda box, x: box.get() * x)(box, x).dtype.name == "bfloat16"
    assert lax.scan(step, x, length=3)[0].dtype.name == "bfloat16"
    assert jax.jit(lambda x: lax.scan(step, x, length=3)[0])(x).dtype.name == "bfloat16"
    assert jax.grad(loss)(x).dtype.name == product(box) == "bfloat16"
    holds(box, 3.0)
    assert (Box(2).get() * jnp.ones(2, jnp.int8)).dtype.name == "int8"


def test_what_is_set_decides_whether_it_counts_as_a_number():
    read = jax.jit(lambda box: box.get() + 1.0)
    box = Box(2.0)
    for value, is_number in ((jnp.float32(3), False), (3.0, True), (np.float32(3), False)):
        box.set(value)
        assert box.get().weak_type == read(box).weak_type == is_number
    # Programs keep what they were traced for.
    box = Box(2.0)
    closed = jax.jit(lambda: box.get() + 1.0)
    assert closed().weak_type
    box.set(jnp.float32(3))
    assert box.get().weak_type
    assert closed().weak_type
    holds(box, 3.0)


@ALL
def test_closed_over(jit):
    box = Box(1.0)

    @jit
    def f(x):
        box.set(box.get() + x)
        return box.get() * 2

    assert f(2.0) == 6.0
    assert f(5.0) == 16.0
    holds(box, 8.0)


@JITS
def test_type_stable_writes_are_traced_once(jit):
    traced = []
    box = Box(1.0)

    @jit
    def closed(x):
        traced.append(x)
        box.set(box.get() + x)

    @jit
    def passed(box, x):
        traced.append(x)
        box.set(box.get() + x)

    for x in (1.0, 2.0, 3.0):
        closed(x)
        passed(box, x)
        passed(Box(2.0), x)
    assert len(traced) == 2
    holds(box, 13.0)


@ALL
def test_passed(jit):
    f = jit(lambda box, x: box.set(box.get() + x))
    for start in (1.0, 2.0):
        box = Box(start)
        f(box, 1.0)
        holds(box, start + 1)


@ALL
def test_passed_in_a_pytree(jit):
    @jit
    def f(tree, x):
        tree["box"].set([tree["box"].get()[0] + tree["a"] * x])

    box = Box([1.0])
    f({"box": box, "a": 2.0}, 3.0)
    holds(box, [7.0])


@ALL
def test_set_without_get(jit):
    box = Box(0.0)
    jit(lambda x: box.set(x))(3.0)
    holds(box, 3.0)


@ALL
def test_two_boxes(jit):
    a, b = Box(1.0), Box(2.0)

    @jit
    def swap(a, b):
        x, y = a.get(), b.get()
        a.set(y)
        b.set(x)

    swap(a, b)
    holds(a, 2.0)
    holds(b, 1.0)


@ALL
def test_one_closed_over_and_one_passed(jit):
    a, b = Box(1.0), Box(10.0)
    f = jit(lambda b: (a.set(a.get() + b.get()), b.set(a.get() * 2)))
    f(b)
    holds(a, 11.0)
    holds(b, 22.0)


@ALL
def test_made_inside(jit):
    def f(x):
        box = Box(x)
        box.set(box.get() * 2)
        box.set([box.get(), x])  # its own trace: any type
        return box.get()[0]

    assert jit(f)(3.0) == 6.0


@ALL
def test_isinstance(jit):
    seen = []
    jit(lambda box: seen.append(isinstance(box, Box)))(Box(1.0))
    assert seen == [True]


@JITS
def test_nested_jit(jit):
    box = Box(5.0)
    inner = jit(lambda x: box.set(box.get() + x))
    outer = jit(lambda x: (inner(x), inner(x)))
    outer(3.0)
    holds(box, 11.0)


@JITS
def test_nested_jit_with_a_box_made_in_the_outer(jit):
    @jit
    def f(x):
        box = Box(x)
        add = jit(lambda y: box.set(box.get() + y))
        add(1.0)
        add(1.0)
        return box.get()

    assert f(2.0) == 4.0


@ALL
def test_grad_leaves_the_box_alone(jit):
    box = Box(0.0)

    def f(x):
        y = 2 * x
        box.set(box.get() + lax.stop_gradient(y))
        return y

    assert jax.grad(jit(f))(1.0) == 2.0  # grad of jit
    holds(box, 2.0)
    assert jit(jax.grad(f))(1.0) == 2.0  # jit of grad
    holds(box, 4.0)


@ALL
def test_grad_with_a_box_as_an_argument(jit):
    box = Box(2.0)

    def f(x, box):
        box.set(lax.stop_gradient(x * 2))
        return x**2 + box.get()

    assert jax.grad(jit(f))(3.0, box) == 6.0
    holds(box, 6.0)


@ALL
def test_value_and_grad_has_aux_and_vjp(jit):
    box = Box(0.0)

    def f(x):
        box.set(lax.stop_gradient(x))
        return x**2, box.get()

    (value, aux), gradient = jax.value_and_grad(jit(f), has_aux=True)(3.0)
    assert (value, aux, gradient) == (9.0, 3.0, 6.0)
    _, pullback = jax.vjp(lambda x: jit(f)(x)[0], 4.0)
    assert pullback(1.0) == (8.0,)
    holds(box, 4.0)


@ALL
def test_jvp(jit):
    box = Box(1.0)

    def f(x):
        box.set(box.get() + lax.stop_gradient(2 * x))
        return 2 * x

    assert jax.jvp(jit(f), (1.0,), (1.0,)) == (2.0, 2.0)
    holds(box, 3.0)


@ALL
def test_a_box_with_a_tangent_box(jit):
    f = jit(lambda box, x: (box.set(box.get() + x), x)[1])
    box, tangent = Box(5.0), Box(1.0)
    jax.jvp(f, (box, 2.0), (tangent, 1.0))
    holds(box, 7.0)
    holds(tangent, 2.0)


@pytest.mark.slow
@ALL
def test_differentiating_through_a_box_made_inside(jit):
    def f(x):
        box = Box(x)
        for _ in range(3):
            box.set(box.get() * x)
        return box.get()

    assert jax.grad(jit(f))(2.0) == 32.0


@ALL
def test_the_backward_pass_gets_the_box_by_reference(jit):
    box = Box(0.0)

    @jax.custom_vjp
    def f(box, x):
        return x

    def backward(box, g):
        box.set(g)  # the cotangent itself
        return None, g

    f.defvjp(lambda box, x: (x, box), backward)
    program = jit(lambda box, x: 2 * f(box, 2 * x))
    assert jax.grad(program, argnums=1)(box, 1.0) == 4.0
    holds(box, 2.0)
    _, pullback = jax.vjp(lambda x: program(box, x), 1.0)
    box.set(0.0)
    pullback(3.0)
    holds(box, 6.0)


@ALL
def test_a_write_in_the_backward_pass_to_a_box_closed_over(jit):
    box = Box(0.0)

    @jax.custom_vjp
    def f(x):
        return x

    def backward(_, g):
        box.set(box.get() + g)
        return (g,)

    f.defvjp(lambda x: (x, None), backward)
    program = jit(lambda x: 2 * f(2 * x))
    jax.grad(program)(1.0)
    jax.grad(program)(1.0)
    holds(box, 4.0)
    jit(jax.grad(lambda x: 3 * f(x)))(1.0)
    holds(box, 7.0)


@ALL
def test_what_the_forward_pass_wrote_is_read_in_the_backward_pass(jit):
    box = Box(0.0)

    @jax.custom_vjp
    def f(box, x):
        return x

    def forward(box, x):
        box.set(x)
        return x, box

    f.defvjp(forward, lambda box, g: (None, g * box.get()))
    assert jax.grad(jit(lambda x: f(box, 5 * x)))(2.0) == 50.0


@ALL
def test_a_custom_vjp_that_is_not_differentiated(jit):
    box = Box(0.0)

    @jax.custom_vjp
    def f(box, x):
        box.set(x)
        return x

    f.defvjp(lambda box, x: 1 / 0, lambda *_: 1 / 0)
    assert jit(lambda x: 2 * f(box, 2 * x))(1.0) == 4.0
    holds(box, 2.0)


@ALL
def test_backward_pass_of_a_scan(jit):
    box = Box(0.0)

    @jax.custom_vjp
    def f(box, x):
        return x

    def backward(box, g):
        box.set(box.get() + g)
        return None, g

    f.defvjp(lambda box, x: (x, box), backward)

    def program(box, c):
        return lax.scan(lambda c, x: (f(box, c) * x, None), c, jnp.arange(1.0, 4.0))[0]

    assert jax.grad(jit(program), argnums=1)(box, 1.0) == 6.0
    holds(box, 15.0)  # 6 + 6 + 3


@ALL
def test_scan(jit):
    box = Box(1.0)

    def f():
        lax.scan(lambda c, _: (box.set(box.get() * 2), (c, None))[1], 0, None, length=10)

    jit(f)()
    holds(box, 1024.0)


@ALL
def test_nested_scans_with_jit_inside(jit):
    box = Box(0)

    def inner(c, _):
        jax.jit(lambda: box.set(box.get() + 1))()
        return c, box.get()

    def f():
        return lax.scan(lambda c, _: lax.scan(inner, c, None, length=5), 0, None, length=3)[1]

    np.testing.assert_array_equal(jit(f)(), np.arange(1, 16).reshape(3, 5))
    holds(box, 15)


@ALL
def test_scan_over_a_box(jit):
    box = Box(X)

    def body(total, b):
        b.set(b.get() * 2)
        return total + b.get(), None

    assert jit(lambda b: lax.scan(body, 0.0, b)[0])(box) == 12.0
    holds(box, 2 * X)


@ALL
def test_while(jit):
    box = Box(1.0)

    def body(i):
        box.set(box.get() * 2)
        return i + 1

    assert jit(lambda: lax.while_loop(lambda i: i < 5, body, 0))() == 5
    holds(box, 32.0)


@ALL
def test_fori(jit):
    box = Box([1, 2])
    f = lambda: lax.fori_loop(0, 4, lambda i, c: (box.set([i, c]), c + 1)[1], 0)  # noqa: E731
    assert jit(f)() == 4
    holds(box, [3, 3])


@ALL
@pytest.mark.parametrize("flag", [True, False])
def test_cond(jit, flag):
    closed, passed = Box(1.0), Box(1.0)

    def f(flag):
        def yes(b):
            closed.set(closed.get() + 1)
            b.set(b.get() + 2)

        lax.cond(flag, yes, lambda b: None, passed)

    jit(f)(flag)
    holds(closed, 2.0 if flag else 1.0)
    holds(passed, 3.0 if flag else 1.0)


@ALL
def test_a_box_made_in_a_branch(jit):
    def doubled(x):
        box = Box(x)
        box.set([box.get() + box.get()])
        return box.get()[0]

    f = jit(lambda x: lax.cond(x > 0, doubled, lambda x: x, x))
    assert f(1.0) == 2.0
    assert f(-1.0) == -1.0


@ALL
def test_remat(jit):
    box = Box(2.0)
    f = jax.checkpoint(lambda x: jnp.sin(x * box.get()))
    np.testing.assert_allclose(jax.grad(jit(f))(1.0), 2 * np.cos(2.0), rtol=1e-6)


@ALL
def test_a_write_under_remat_happens_again_when_it_is_recomputed(jit):
    box = Box(0.0)

    @jax.checkpoint
    def f(x):
        box.set(box.get() + 1)
        return jnp.sin(jnp.sin(x))

    jit(f)(1.0)
    holds(box, 1.0)
    jax.grad(jit(f))(1.0)
    holds(box, 3.0)  # forward, and again for the gradient


@ALL
def test_vmap_with_a_box_made_inside(jit):
    def f(x):
        box = Box(x)
        box.set({"twice": box.get() * 2})
        return box.get()["twice"]

    np.testing.assert_allclose(jit(jax.vmap(f))(X), 2 * X)
    np.testing.assert_allclose(jax.vmap(jit(f))(X), 2 * X)
    assert jax.vmap(lambda: Box(jnp.array(0)).get(), axis_size=2)().shape == (2,)


@ALL
def test_vmap_over_a_box(jit):
    box = Box(X)
    f = jit(lambda b, x: (b.set(b.get() + x), b.get())[1])
    np.testing.assert_allclose(jax.vmap(f)(box, X), 2 * X)
    holds(box, 2 * X)
    np.testing.assert_allclose(jax.vmap(f, in_axes=(0, None))(box, 1.0), 2 * X + 1)


@ALL
def test_vmap_reads_a_box_that_is_shared(jit):
    box = Box(2.0)
    np.testing.assert_allclose(jax.vmap(jit(lambda x: x * box.get()))(X), 2 * X)
    shared = jax.vmap(jit(lambda b, x: x * b.get()), in_axes=(None, 0))
    np.testing.assert_allclose(shared(box, X), 2 * X)


@pytest.mark.slow
@ALL
def test_hi_contents(jit):
    box = Box([quantize(MATRIX), tup(X, X + 1)])

    def f():
        q, t = box.get()
        box.set([quantize(dequantize(q) * 2), tup(element(t, 1), element(t, 0))])

    expected = np.asarray(dequantize(quantize(MATRIX)))
    jit(f)()
    q, t = box.get()
    assert isinstance(q, Quant)
    np.testing.assert_allclose(dequantize(q), 2 * expected, rtol=1e-5)
    np.testing.assert_allclose(t.elements[0], X + 1)
    jit(lambda b: b.set([b.get()[0], tup(X, X)]))(box)
    np.testing.assert_allclose(box.get()[1].elements[0], X)


@pytest.mark.slow
@ALL
def test_hi_contents_in_loops_and_under_grad(jit):
    box = Box(quantize(MATRIX))

    def f(x):
        def body(c, _):
            box.set(quantize(dequantize(box.get()) + lax.stop_gradient(x)))
            return c, None

        lax.scan(body, 0, None, length=2)
        lax.cond(True, lambda: body(0, 0)[0], lambda: 0)
        return (x * dequantize(box.get())).sum()

    gradient = jax.grad(jit(f))(jnp.ones_like(MATRIX))
    np.testing.assert_allclose(gradient, dequantize(box.get()), rtol=1e-5)
    np.testing.assert_allclose(gradient, MATRIX + 3, rtol=2e-2)


@JITS
def test_lower_and_compile(jit):
    box = Box(1.0)

    def f(box):
        box.set(box.get() + 1)

    compiled = jit(f).lower(box).compile()
    for _ in range(3):
        compiled(box)
    holds(box, 4.0)


@JITS
def test_eval_shape_does_not_write(jit):
    box = Box(1.0)
    shape = jax.eval_shape(jit(lambda b, x: (b.set(x), b.get() * X)[1]), box, 2.0)
    assert shape.shape == (3,)
    holds(box, 1.0)


def test_tree_map_gives_back_the_same_box():
    for box in (Box(X), Box(None), Box({"a": 1})):
        assert jax.tree.map(lambda leaf: leaf, box) is box
        leaves, structure = jax.tree.flatten({"x": box})
        assert jax.tree.unflatten(structure, leaves)["x"] is box


def test_a_box_is_a_pytree_of_its_leaves():
    box = Box({"a": X, "b": 1.0})
    assert len(jax.tree.leaves(box)) == 2
    assert jax.tree.structure(box) == jax.tree.structure(Box({"a": jnp.ones((2, 2), int), "b": 0}))
    assert jax.tree.structure(box) != jax.tree.structure(Box({"a": X, "c": 0}))
    # A Python number makes another program than an array, so jit must tell them apart.
    assert jax.tree.structure(box) != jax.tree.structure(Box({"a": X, "b": jnp.ones(())}))
    assert len(jax.tree_util.tree_leaves_with_path({"x": box})) == 2
    jax.tree.map(lambda leaf: "anything", box)


def test_repr():
    assert repr(Box({"a": X, "b": [1, None]})) == "Box({'a': float32[3], 'b': [int32[], None]})"
    assert repr(Box(None)) == "Box(None)"
    assert "Quant[2,3]" in repr(Box(quantize(MATRIX)))
    assert repr(Box(1.0).type) == "Box(float32[])"


def test_types_compare_shapes_dtypes_and_structure():
    assert Box(1.0).type == Box(jnp.float32(2)).type
    assert hash(Box(1.0).type) == hash(Box(jnp.float32(2)).type)
    assert Box(1.0).type != Box(1).type
    assert Box(X).type != Box([X]).type
    assert Box(quantize(MATRIX)).type == Box(quantize(MATRIX + 1)).type


@pytest.mark.slow
@pytest.mark.parametrize("around", [jax.vmap, lambda f: jax.jit(jax.vmap(f))], ids=["vmap", "jit"])
def test_what_is_the_same_for_all_examples_is_written_once(around):
    """JAX refuses the write as such."""
    box = Box(jnp.float32(0))

    def fn(x):
        box.set(box.get() + 1)
        return x * box.get()

    np.testing.assert_allclose(around(fn)(MATRIX), MATRIX)
    holds(box, np.float32(1))
    np.testing.assert_allclose(around(jax.grad(lambda x: fn(x).sum()))(MATRIX), 2 * MATRIX**0)
    holds(box, np.float32(2))


PARTS = {
    "jit": jax.jit,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (c, f(x)), None, None, length=1)[1][0],
    "checkpoint": jax.checkpoint,
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("around", [jax.vmap, lambda f: jax.jit(jax.vmap(f))], ids=["vmap", "jit"])
def test_the_same_in_a_nested_program(around, part):
    """JAX's rule for the write is asked there, and would refuse."""
    box = Box(jnp.float32(1))

    @PARTS[part]
    def fn(x):
        y = x * box.get()
        box.set(box.get() + 1)
        return y

    np.testing.assert_allclose(around(jax.vmap(fn))(MATRIX), MATRIX)
    holds(box, np.float32(2))


def test_what_differs_is_still_refused():
    box = Box(jnp.float32(0))
    with pytest.raises(TypeError, match="shared by all examples"):
        jax.vmap(lambda x: box.set(x.sum()))(MATRIX)
    holds(box, np.float32(0))


@ALL
def test_a_box_beside_another_is_not_differentiated(jit):
    """One made in the function would be, and JAX 0.10.2 can't transpose a remat that writes it."""
    outer = Box(0.0)

    def largest(x, w, box):
        def body(c, w):
            seen.set(jnp.maximum(seen.get(), lax.stop_gradient(jnp.abs(c).max())))
            return jnp.tanh(c * w), None

        seen = box.beside(np.float32(0))
        seen.set(np.float32(0))
        y = lax.scan(jax.checkpoint(body), x, w)[0]
        box.set(seen.get())
        return y.sum()

    step = jit(lambda x, w, box: jax.grad(largest)(x, w, box))
    expected = jax.grad(lambda x: jnp.tanh(jnp.tanh(x * X) * (X + 1)).sum())
    for scale in (2, 1):
        actual = step(scale * X, MATRIX, outer)
        np.testing.assert_allclose(actual, expected(scale * X), rtol=1e-5, atol=1e-6)
        holds(outer, 3.0 * scale)


def test_a_box_beside_one_that_escaped():
    kept = []
    jax.jit(lambda: kept.append(Box(1.0)))()
    with pytest.raises(RuntimeError, match="escaped its trace"):
        kept[0].beside(1.0)
