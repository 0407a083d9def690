"""What can't be done with a Box, and what the error says to do instead."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hijax_trace as ht
from hijax_trace import Box
from jaxtap_testkit.hijax_samples import Quant, QuantTy, quantize
from jaxtap_testkit.strict import checking_leaks

pytestmark = pytest.mark.sample(2)

X = np.array([1.0, 2.0, 3.0], np.float32)
ALL = pytest.mark.parametrize("jit", [lambda f: f, jax.jit, ht.jit], ids=["eager", "jit", "ht.jit"])


@ALL
@pytest.mark.parametrize("empty", [False, True])
def test_a_box_in_a_box(jit, empty):
    inner, outer = Box(None if empty else 1.0), Box(2.0)
    for put in (lambda: Box({"a": [inner]}), lambda: outer.set(inner)):
        with pytest.raises(TypeError, match=r"got a Box in them. Put what that holds there"):
            jit(put)()
    assert outer.get() == 2.0
    outer.set({"a": inner.get()})
    assert outer.get() == {"a": inner.get()}


def test_a_reference_in_a_box():
    with pytest.raises(
        TypeError, match=r"must be arrays, numbers and values of hi types.*got .*Ref"
    ):
        Box(jax.new_ref(jnp.ones(2)))


SIGNATURES = {
    "none": lambda self: "short",
    "short dtypes": lambda self, short_dtypes=False: "short",
    "mesh axes": lambda self, mesh_axis_types=False: "short",
    "both": lambda self, short_dtypes=False, mesh_axis_types=False: "short",
    "any": lambda self, short_dtypes=False, **options: "short",
}


@ALL
@pytest.mark.parametrize("signature", SIGNATURES)
def test_a_hi_type_that_names_itself(jit, signature):
    class Named(QuantTy):
        str_short = SIGNATURES[signature]

    class Value(Quant):
        pass

    ht.register_hitype(Value, lambda value: Named.of(value.values.shape))
    Named.raise_val = lambda self, *parts: Value(*parts)
    first, second = (Value(jnp.full((2, 3), i, "int8"), jnp.ones(2) * i) for i in (1, 2))
    box = Box(first)
    assert (repr(box), repr(box.type)) == ("Box(short)", "Box(short)")
    jit(lambda value: box.set(value))(second)
    np.testing.assert_array_equal(box.get().values, second.values)
    np.testing.assert_array_equal(box.get().scale, second.scale)


@ALL
def test_change_in_a_scan(jit):
    box = Box(1.0)

    def body(c, _):
        box.set([box.get()])
        return c, None

    message = r"keep its type in a loop, which is Box\(float32\[\]\), got .*Box\(\[float32\[\]\]\)"
    with pytest.raises(TypeError, match=message + ".* in the body of scan"):
        jit(lambda: lax.scan(body, 0, None, length=2)[0])()
    assert box.get() == 1.0


@ALL
def test_change_in_a_while_loop(jit):
    box = Box([1.0])

    def body(i):
        box.set(box.get() * 2)
        return i + 1

    with pytest.raises(TypeError, match=r"in the body of while_loop.*final type before the loop"):
        jit(lambda: lax.while_loop(lambda i: i < 2, body, 0))()


@ALL
def test_change_in_a_scan_to_a_box_that_is_scanned_over(jit):
    def body(c, b):
        b.set([b.get()])
        return c, None

    with pytest.raises(TypeError, match="keep its type in a loop"):
        jit(lambda b: lax.scan(body, 0, b)[0])(Box(X))


@ALL
def test_change_in_a_branch(jit):
    box = Box(1.0)
    with pytest.raises(TypeError, match=r"in a branch of cond.*write it after cond"):
        jit(lambda p: lax.cond(p, lambda: box.set(None), lambda: None))(True)


def test_change_under_plain_jit_of_a_box_closed_over():
    box = Box(1.0)
    with pytest.raises(TypeError, match=r"fixed inside of jit.*used in jit.*Use hijax_trace\.jit"):
        jax.jit(lambda: box.set(None))()
    assert box.get() == 1.0
    ht.jit(lambda: box.set(None))()  # as it says
    assert box.get() is None


def test_change_under_plain_jit_of_a_box_passed():
    with pytest.raises(TypeError, match=r"passed into jit from outside\. Use hijax_trace\.jit"):
        jax.jit(lambda b: b.set([b.get()]))(Box(1.0))


def test_change_under_plain_jit_of_an_empty_box():
    with pytest.raises(TypeError, match=r"is Box\(None\).*got a value of type Box\(float32\[\]\)"):
        jax.jit(lambda b, x: b.set(x))(Box(None), 1.0)


def test_change_by_an_inner_function_under_plain_jit():
    box = Box(None)
    inner = ht.jit(lambda x: box.set(x))
    with pytest.raises(TypeError, match="fixed inside of jit"):
        jax.jit(lambda x: inner(x))(1.0)
    inner(1.0)
    assert box.get() == 1.0


def test_change_under_checkpoint():
    box = Box(1.0)
    with pytest.raises(TypeError, match="fixed inside of checkpoint"):
        jax.checkpoint(lambda x: (box.set([x]), x)[1])(1.0)


def test_change_of_a_mapped_box():
    with pytest.raises(TypeError, match=r"fixed inside of vmap.*passed into vmap"):
        jax.vmap(lambda b: b.set([b.get()]))(Box(X))


def test_change_after_a_plain_trace_has_captured_the_box():
    box = Box(1.0)
    jax.jit(lambda: box.get())()
    box.set(2.0)
    with pytest.raises(TypeError, match=r"fixed since jit used it from outside.*make a new Box"):
        box.set([1.0])
    with pytest.raises(TypeError, match="fixed since jit used it"):
        ht.jit(lambda: box.set([1.0]))()
    assert box.get() == 2.0


def test_passing_a_box_to_plain_jit_does_not_fix_its_type():
    box = Box(1.0)
    f = jax.jit(lambda b: jax.tree.map(lambda x: x * 2, b.get()))
    f(box)
    box.set([3.0])
    assert f(box) == [6.0]


def test_plain_jit_inside_of_hijax_trace_jit_fixes_the_type():
    box = Box(1.0)
    inner = jax.jit(lambda: box.get())
    ht.jit(lambda: inner())()
    with pytest.raises(TypeError, match="fixed since jit used it"):
        box.set([1.0])


@ALL
def test_differentiating_through_set(jit):
    box = Box(1.0)
    for write in (lambda x: box.set(x * 2), lambda x: box.set(jnp.sin(x) + box.get())):
        f = jit(lambda x, write=write: (write(x), x)[1])
        for transform in (jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))):
            with pytest.raises(TypeError, match=r"box\.set\(jax\.lax\.stop_gradient\(value\)\)"):
                transform(f)(1.0)
    assert box.get() == 1.0


@ALL
def test_differentiating_through_set_of_an_argument(jit):
    f = jit(lambda x, box: (box.set(x * 2), x)[1])
    with pytest.raises(TypeError, match="stop_gradient"):
        jax.grad(f)(1.0, Box(1.0))


def test_differentiating_through_a_change_of_type():
    box = Box(None)
    for f in (lambda x: (box.set([x]), x)[1], ht.jit(lambda x: (box.set([x]), x)[1])):
        with pytest.raises(TypeError, match="stop_gradient"):
            jax.grad(f)(1.0)
    assert box.get() is None


@ALL
def test_differentiating_through_hi_contents(jit):
    box = Box(quantize(np.stack([X, X])))
    f = jit(lambda x: (box.set(quantize(x)), x.sum())[1])
    with pytest.raises(TypeError, match="stop_gradient"):
        jax.grad(f)(np.stack([X, X + 1]))


@ALL
def test_a_mapped_value_in_a_box_that_is_not(jit):
    box = Box(1.0)
    with pytest.raises(TypeError, match=r"shared by all examples.*in_axes=0"):
        jax.vmap(jit(lambda x: box.set(x)))(X)
    assert box.get() == 1.0


def test_a_mapped_value_and_a_change_of_type():
    box = Box(None)
    for f in (lambda x: box.set(x), ht.jit(lambda x: box.set(x))):
        with pytest.raises(TypeError, match="shared by all examples"):
            jax.vmap(f)(X)


@pytest.mark.parametrize("use", [lambda b: b.get(), lambda b: b.set(1.0), lambda b: b.set([1.0])])
@pytest.mark.parametrize("jit", [jax.jit, ht.jit], ids=["jit", "ht.jit"])
def test_a_box_that_escaped(jit, use):
    escaped = []
    jit(lambda x, b: escaped.extend([Box(x), b]) and None)(1.0, Box(1.0))
    for box in escaped:
        with pytest.raises(RuntimeError, match=r"escaped its trace.*Return box\.get\(\)"):
            use(box)
        assert repr(box).startswith("Box(")


def test_a_box_that_escaped_from_a_loop():
    escaped = []
    lax.scan(lambda c, _: (escaped.append(Box(c)) or c, None), 1.0, None, length=1)
    with pytest.raises(RuntimeError, match="escaped its trace"):
        escaped[0].get()
    with pytest.raises(RuntimeError, match="escaped its trace"):
        jax.grad(lambda x: x * escaped[0].get())(1.0)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        jax.jit(lambda: escaped[0].get())()  # JAX finds it, after tracing


def test_returning_a_box_from_plain_jit():
    with pytest.raises(ValueError, match="returned a mutable array reference"):
        jax.jit(lambda x: Box(x))(1.0)


def test_an_alias_under_plain_jit():
    box = Box(1.0)
    with pytest.raises(ValueError, match="only one reference to a mutable array"):
        jax.jit(lambda a, b: a.get() + b.get())(box, box)
    with pytest.raises(ValueError, match="both closed over and passed"):
        jax.jit(lambda b: box.get() + b.get())(box)


def test_a_box_as_a_carry():
    with pytest.raises(ValueError, match="mutable array reference"):
        lax.scan(lambda b, _: (b, None), Box(1.0), None, length=2)


def test_donating_a_box():
    f = ht.jit(lambda x, b: b.set(x), donate_argnums=(0, 1))
    with pytest.raises(TypeError, match=r"must not hold a Box.*argument 1.*donate_argnums"):
        f(1.0, Box(1.0))


def test_a_program_ahead_of_time_that_changes_a_type():
    f = ht.jit(lambda b: b.set([b.get()]))
    with pytest.raises(TypeError, match="compiled ahead of time can't change the type"):
        f.lower(Box(1.0))


@pytest.mark.parametrize("value", ["text", object(), {"a": "text"}, [b"bytes"]])
def test_contents_that_are_no_values(value):
    with pytest.raises(TypeError, match="must be arrays, numbers and values of hi types"):
        Box(value)
    with pytest.raises(TypeError, match="Keep that outside of the Box"):
        Box().set(value)


def test_boxes_are_freed():
    box = Box(X)
    f = ht.jit(lambda b: b.set([b.get()]))
    f(box)
    jax.jit(lambda b: b.set([b.get()[0] * 2]))(box)
    watch = weakref.ref(box)
    del box
    gc.collect()
    assert watch() is None


def test_no_tracer_leaks():
    box = Box(None)
    with checking_leaks():
        for x in (1.0, 2.0):
            ht.jit(lambda x: box.set([x]))(x)
            ht.jit(lambda b, x: b.set({"x": x}))(Box(1.0), x)
