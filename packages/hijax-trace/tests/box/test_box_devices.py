"""Boxes with shardings and under shard_map, on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import hijax_trace as ht
from hijax_trace import Box
from jaxtap_testkit.meshes import line, put

NUMBERS = np.arange(8, dtype=np.float32)


@pytest.fixture(params=[jax.jit, ht.jit], ids=["jax", "hijax_trace"])
def jit(request):
    return request.param


@pytest.fixture
def mesh():
    return line()


@pytest.fixture
def x(mesh):
    """Numbers that are shared out."""
    return put(mesh, NUMBERS, "d")


def zeros(mesh):
    return Box(put(mesh, np.zeros(8, np.float32), "d"))


def each(fn, mesh, *in_specs):
    """Return the function over the parts that devices have."""
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=P("d"))


def test_each_device_updates_its_part(jit, mesh, x):
    def add(box, x):
        box.set(box.get() + x)
        return x * 2

    box, f = zeros(mesh), jit(each(add, mesh, P("d"), P("d")))
    f(box, x)
    np.testing.assert_allclose(f(box, x), 2 * NUMBERS)
    np.testing.assert_allclose(box.get(), 2 * NUMBERS)
    assert box.get().sharding.is_equivalent_to(x.sharding, 1)


def test_all_devices_agree_on_one_value(jit, mesh, x):
    def reduce(box, x):
        box.set({"sum": box.get()["sum"] + lax.psum(x, "d")})
        return x

    total = Box({"sum": put(mesh, np.zeros(1, np.float32))})
    jit(each(reduce, mesh, P(), P("d")))(total, x)
    np.testing.assert_allclose(total.get()["sum"], [28.0])


def test_under_grad_with_a_loop_inside(jit, mesh, x):
    box = zeros(mesh)

    def loss(x):
        def body(box, x):
            def step(c, _):
                box.set(box.get() + lax.stop_gradient(x))
                return c, None

            lax.scan(step, 0, None, length=2)
            return x * x

        return each(body, mesh, P("d"), P("d"))(box, x).sum()

    np.testing.assert_allclose(jit(jax.grad(loss))(x), 2 * NUMBERS)
    np.testing.assert_allclose(box.get(), 2 * NUMBERS)


def test_a_box_made_inside(jit, mesh, x):
    def local(x):
        box = Box(x)
        box.set([box.get() * 3])
        return box.get()[0]

    np.testing.assert_allclose(jit(each(local, mesh, P("d")))(x), 3 * NUMBERS)


CLOSED_OVER = {
    "at once": lambda x, box: x + box.get(),
    "in a scan": lambda x, box: lax.scan(lambda c, _: (c + box.get(), None), x, length=2)[0],
    "in jit": lambda x, box: jax.jit(lambda x: x + box.get())(x),
    "written": lambda x, box: box.set(jnp.zeros_like(x)) or x,
}


@pytest.mark.parametrize("where", CLOSED_OVER)
def test_a_box_that_is_closed_over_is_refused(jit, mesh, x, where):
    box = zeros(mesh)
    with pytest.raises(NotImplementedError, match="Pass the Box to the function with a spec"):
        jit(each(lambda x: CLOSED_OVER[where](x, box), mesh, P("d")))(x)


def test_one_value_for_each_device_is_refused(jit, mesh, x):
    def add(box, x):
        box.set(box.get() + x)
        return x

    with pytest.raises(TypeError, match="which all devices of a shard_map share"):
        jit(each(add, mesh, P(), P("d")))(Box(put(mesh, np.zeros(1, np.float32))), x)


def test_what_is_around_a_box(jit, mesh, x):
    outer, found = Box(np.float32(0)), []

    def local(box, x):
        inner = Box(x)

        def step(c, _):
            found[:] = [one.around() for one in (outer, box, inner)]
            return c, None

        return lax.scan(step, x, length=2)[0]

    jit(each(local, mesh, P("d"), P("d")))(zeros(mesh), x)
    assert found == [["scan", "shard_map"], ["scan"], ["scan"]]
    assert outer.around() == []


def test_outside_of_shard_map_it_keeps_the_sharding_of_what_is_written(x):
    box = Box(None)

    @ht.jit
    def collect(x):
        held = box.get()
        box.set(x if held is None else held + x)

    collect(x)
    collect(x)
    np.testing.assert_allclose(box.get(), 2 * NUMBERS)
    assert box.get().sharding.is_equivalent_to(x.sharding, 1), box.get().sharding


def test_sharding_in_types():
    mesh = line(AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = put(mesh, jnp.asarray(NUMBERS), "d")
        box = Box(x)
        jax.jit(lambda b, x: b.set(b.get() + x))(box, x)
        ht.jit(lambda b, x: b.set([b.get() + x]))(box, x)
        np.testing.assert_allclose(box.get()[0], 3 * NUMBERS)
        assert jax.typeof(box.get()[0]).sharding.spec == P("d")


def test_a_type_that_comes_back_elsewhere(mesh, x):
    """New contents lie where their values do, however often a program was made for their type."""
    box, f = Box(x), ht.jit(lambda: jax.tree.map(lambda leaf: leaf * 2, box.get()))
    here = put(mesh, NUMBERS)
    for value in (x, [x], here, [here], x, [here], NUMBERS):
        box.set(value)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 2 * b), f(), value)
        if isinstance(value, jax.Array):
            assert box.get().sharding.is_equivalent_to(value.sharding, 1)
