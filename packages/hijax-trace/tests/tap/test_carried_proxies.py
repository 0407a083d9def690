"""Array proxies that programs update, carry through loops and return."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hijax_trace import MoveError, TraceEngine, untransposed
from interception_core import Interceptor
from jaxtap_testkit.coded import Coded, decoded
from jaxtap_testkit.numbers import normal

N, S, D = 3, 6, 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Signs(Coded):
    """Rows whose elements are 0 or plus or minus one number, which their scale is: exact."""

    is_carried = True

    def encode(self, array, axes):
        coarse = [
            place
            for place, axis in enumerate(axes)
            if axis is None or self.scale.shape[axis] < self.shape[axis]
        ]
        coarse = [place for place in coarse if axes[place] is not None]
        most = jnp.max(jnp.abs(array), tuple(coarse), keepdims=True)
        codes = array / jnp.where(most == 0, 1, most)
        return Signs(codes.astype(jnp.int8), most)


def signs(*shape, seed=0):
    rng = np.random.default_rng(seed)
    codes = jnp.asarray(rng.integers(-1, 2, shape), jnp.int8).at[..., 0].set(1)
    return Signs(codes, jnp.asarray(rng.integers(1, 9, (*shape[:-1], 1)), jnp.float32))


def read(cache, x):
    return jnp.einsum("...sd,...d->...s", cache, x)


def updated(cache, rows, x, i):
    cache = lax.dynamic_update_slice(cache, rows[:, :1], (0, i, 0))
    return read(cache, x), cache


def indexed(cache, rows, x, i):
    cache = cache.at[:, i].set(rows[:, 0])
    return read(cache, x), cache


def negative(cache, rows, x, i):
    cache = cache.at[:, -i].set(rows[:, 0])
    return read(cache, x), cache


def outside(cache, rows, x, i):
    """One row is written outside, that is, nowhere."""
    places = jnp.array([0, S + 2, 1]) + i
    cache = cache.at[jnp.arange(N), places].set(rows[:, 0])
    return read(cache, x), cache


def mapped_update(cache, rows, x, i):
    places = i + jnp.arange(N) % 2
    put = jax.vmap(lambda c, r, i: lax.dynamic_update_slice(c, r, (i, 0)))
    cache = put(cache, rows[:, :1], places)
    return read(cache, x), cache


def selected(cache, rows, x, i):
    cache = jnp.where((jnp.arange(S) == i)[:, None], rows[:, :1], cache)
    return read(cache, x), cache


def kept_by_a_flag(cache, rows, x, i):
    cache = jnp.where(i > 1, cache, cache.at[:, i].set(rows[:, 0]))
    return read(cache, x), cache


def shifted(cache, rows, x, i):
    cache = jnp.concatenate([cache[:, 1:], rows[:, :1]], 1)
    return read(cache, x), cache


def rolled(cache, rows, x, i):
    cache = jnp.roll(cache, -1, 1).at[:, -1].set(rows[:, 0])
    return read(cache, x), cache


def moved(cache, rows, x, i):
    there = cache.transpose(1, 0, 2).reshape(S, 1, N, D)
    there = lax.dynamic_update_slice(there, rows[None, None, :, 0], (i, 0, 0, 0))
    cache = there.reshape(S, N, D).swapaxes(0, 1)
    return read(cache, x), cache


def scanned(cache, rows, x, i):
    def step(cache, row):
        j, row = row
        cache = lax.dynamic_update_slice(cache, row[:, None], (0, j, 0))
        return cache, read(cache, x)

    cache, out = lax.scan(step, cache, (jnp.arange(3), rows.swapaxes(0, 1)[:3]))
    return out, cache


def stepped(cache, rows, x, i):
    def step(total, each):
        cache, row, x = each
        cache = lax.dynamic_update_slice(cache, row[:1], (i, 0))
        out = read(cache, x)
        return total + out, cache

    return lax.scan(step, jnp.zeros(S), (cache, rows, x), reverse=True)


def nested(cache, rows, x, i):
    def outer(cache, j):
        def inner(carried, row):
            k, cache, total = carried
            cache = cache.at[k, j].set(row[0])
            return (k + 1, cache, total + read(cache[k], x[0])), None

        (_, cache, total), _ = lax.scan(inner, (0, cache, jnp.zeros(S)), rows)
        return cache, total

    cache, out = lax.scan(outer, cache, jnp.arange(2))
    return out, cache


def counted(cache, rows, x, i):
    def body(j, carried):
        cache, total = carried
        cache = cache.at[:, j].set(rows[:, j])
        return cache, total + read(cache, x)

    cache, out = lax.fori_loop(0, 3, body, (cache, jnp.zeros((N, S))))
    return out, cache


def repeated(cache, rows, x, i):
    def body(carried):
        j, cache = carried
        return j + 1, cache.at[:, j].set(rows[:, 0])

    _, cache = lax.while_loop(lambda carried: carried[0] < i + 2, body, (i, cache))
    return read(cache, x), cache


def branched(cache, rows, x, i):
    cache = lax.cond(i > 1, lambda c, r: c.at[:, 0].set(r[:, 0]), lambda c, r: c, cache, rows)
    return read(cache, x), cache


def branched_reads(cache, rows, x, i):
    """Operations in branches have the labels of these in their ids."""

    def write(cache):
        cache = cache.at[:, i].set(rows[:, 0])
        return read(cache, x), cache

    return lax.cond(i > 1, write, lambda cache: (read(cache, -x), cache), cache)


def switched(cache, rows, x, i):
    branches = [lambda c, j=j: c.at[:, j].set(rows[:, j]) for j in range(3)]
    cache = lax.switch(i, branches, cache)
    return read(cache, x), cache


@jax.jit
def _write(cache, rows, i):
    return cache.at[:, i].set(rows[:, 0])


@jax.jit
def _read(cache, x):
    return jnp.tanh(read(cache, x))


def jitted(cache, rows, x, i):
    cache = _write(_write(cache, rows, i), -rows, i + 1)
    return _read(cache, x) + _read(cache, -x), cache


@jax.custom_jvp
def _guarded(cache, rows):
    return cache.at[:, 0].set(rows[:, 0])


_guarded.defjvp(lambda primals, tangents: (_guarded(*primals), tangents[0]))


def with_rules(cache, rows, x, i):
    cache = jax.checkpoint(lambda c: c.at[:, i].set(rows[:, 1]))(_guarded(cache, rows))
    return jax.checkpoint(lambda c: jnp.tanh(read(c, x)))(cache), cache


def mapped(cache, rows, x, i):
    def one(cache, rows, x, i):
        cache = cache.at[i].set(rows[0])
        return read(cache, x), cache

    return jax.vmap(one, (0, 0, 0, None))(cache, rows, x, i)


def mapped_scan(cache, rows, x, i):
    """The map is over another axis than the first; the loop is inside of it."""

    def one(cache, rows, x):
        def step(cache, row):
            cache = cache.at[i].set(row)
            return cache, read(cache, x)

        cache, out = lax.scan(step, cache, rows)
        return out, cache

    out, cache = jax.vmap(one, (1, 0, 0), (0, 1))(cache.swapaxes(0, 1), rows, x)
    return out, cache.swapaxes(0, 1)


def differentiated(cache, rows, x, i):
    cache = cache.at[:, i].set(rows[:, 0])
    return jax.grad(lambda x: (jnp.tanh(read(cache, x)) ** 2).sum())(x), cache


def split_in_two(cache, rows, x, i):
    """Parts are written apart and joined."""
    first, second = jnp.split(cache, 2, 1)
    first = first.at[:, i % 3].set(rows[:, 0])
    return read(first, x), jnp.concatenate([first, second], 1)


PROGRAMS = {
    fn.__name__: fn
    for fn in (
        updated,
        indexed,
        negative,
        outside,
        mapped_update,
        selected,
        kept_by_a_flag,
        shifted,
        rolled,
        moved,
        scanned,
        stepped,
        nested,
        counted,
        repeated,
        branched,
        branched_reads,
        switched,
        jitted,
        with_rules,
        mapped,
        mapped_scan,
        differentiated,
        split_in_two,
    )
}


def arguments():
    cache, rows = signs(N, S, D), signs(N, S, D, seed=1)
    x = normal(N, D)
    return cache, rows.restore(), x


def tap(fn, target="jax.numpy.einsum"):
    """Return a tapped function and what its handler saw: ids and whether there was a proxy."""
    seen = []

    def look(call, *args, **params):
        arrays = [x for x in args if hasattr(x, "shape")]
        seen.append((call.op_id, any(isinstance(call.proxy(x), Signs) for x in arrays)))
        return NotImplemented

    return jax.jit(TraceEngine().wrap(fn, Interceptor({target: look}))), seen


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_carry_proxies(name):
    """Results are those of the arrays, bit for bit; what is updated comes out as a proxy."""
    fn = PROGRAMS[name]
    cache, rows, x = arguments()
    tapped, seen = tap(fn)
    plain, ids = tap(fn)
    for i in range(3):
        found, held = tapped(cache, rows, x, i)
        expected, after = plain(decoded(cache), rows, x, i)
        assert isinstance(held, Signs)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(held.restore(), after)
    # The operations have the ids that they have with arrays.
    assert [op_id for op_id, _ in seen] == [op_id for op_id, _ in ids]
    # What the program itself differentiates is asked about before proxies are carried.
    assert name == "differentiated" or all(is_held for _, is_held in seen)
    again, _ = tapped(held, rows, x, 1)
    assert again.shape == found.shape


@pytest.mark.slow
def test_primitives_and_eager_calls():
    cache, rows, x = arguments()
    _, seen = tapped = tap(scanned, "primitive:dot_general")
    tapped[0](cache, rows, x, 0)
    assert len(seen) == 1
    assert seen[0][1]
    eager = TraceEngine().wrap(scanned, Interceptor({"jax.numpy.tanh": lambda call, x: x}))
    found, held = eager(cache, rows, x, 0)
    expected, after = scanned(decoded(cache), rows, x, 0)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(held.restore(), after)


def test_donated_and_without_a_float_copy():
    cache, rows, x = arguments()
    program = jax.jit(tap(scanned)[0], donate_argnums=0)
    text = program.lower(cache, rows, x, 0).as_text()
    carried = next(line for line in text.splitlines() if "stablehlo.while" in line)
    assert f"tensor<{N}x{S}x{D}xi8>" in carried
    assert f"tensor<{N}x{S}x{D}xf32>" not in carried
    program(cache, rows, x, 0)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))


def test_sharded(mesh):
    from jax.sharding import PartitionSpec as P

    def step(cache, rows, x, i):
        specs = (P(None, None), P(None, None), P(None, None), P())
        run = jax.shard_map(
            updated, mesh=mesh, in_specs=specs, out_specs=(P(None, None), P(None, None))
        )
        return run(cache, rows, x, i)

    cache, rows, x = arguments()
    found, held = tap(step)[0](cache, rows, x, 2)
    expected, after = updated(decoded(cache), rows, x, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(held.restore(), after)


ENDS = {
    "adds": lambda c, r, x, i: (read(c, x), c + 1),
    "writes parts of rows": lambda c, r, x, i: (read(c, x), c.at[:, i, :2].set(r[:, 0, :2])),
    "mask of elements": lambda c, r, x, i: (read(c, x), jnp.where(jnp.arange(D) > 1, c, r)),
    "other branch": lambda c, r, x, i: (
        read(c, x),
        lax.cond(i > 0, lambda c: 2 * c, lambda c: c.at[:, 0].set(r[:, 0]), c),
    ),
    "loop": lambda c, r, x, i: (read(c, x), lax.fori_loop(0, 2, lambda i, c: c * 2, c)),
    "into another array": lambda c, r, x, i: (read(c, x), r.at[:, 0].set(c[:, 1])),
    "a part": lambda c, r, x, i: (read(c, x), c[:, :2]),
    "sorted": lambda c, r, x, i: (read(c, x), jnp.sort(c, 1)),
}


@pytest.mark.parametrize("name", ENDS)
def test_where_proxies_end(name):
    """There the program has the array, and returns one."""
    fn = ENDS[name]
    cache, rows, x = arguments()
    for i in range(2):
        found, held = tap(fn)[0](cache, rows, x, i)
        expected, after = fn(decoded(cache), rows, x, i)
        assert isinstance(held, jax.Array)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(held, after, rtol=1e-6)


def test_left_says_why():
    reasons = []

    class Noting(Signs):
        def on_dropped(self, reason):
            reasons.append(reason)

    jax.tree_util.register_dataclass(Noting, ["codes", "scale"], [])
    cache, rows, x = arguments()
    noting = Noting(cache.codes, cache.scale)
    for name in ("writes parts of rows", "mask of elements", "other branch", "loop"):
        tap(ENDS[name])[0](noting, rows, x, 0)
    text = "\n".join(reasons)
    for part in ("2 of 4 elements of axis 2", "differ along axis 2", "different forms"):
        assert part in text
    assert "carries what mul makes of it" in text


def test_computed_replaces_what_no_handler_does():
    """Also where a handler lets the original run, but not for another array than the proxy's."""

    class Counting(Signs):
        def computed(self, primitive, params, operands):
            if primitive != "dot_general":
                return None
            x = next(one for one in operands if one is not self)
            return [jnp.full((N, S), 7.0)] if x.shape == (N, D) else None

    jax.tree_util.register_dataclass(Counting, ["codes", "scale"], [])
    cache, rows, x = arguments()
    counting = Counting(cache.codes, cache.scale)

    def run(handler, target):
        fn = jax.jit(TraceEngine().wrap(updated, Interceptor({target: handler})))
        return fn(counting, rows, x, 1)[0]

    def lets(call, *args, **params):
        return call.proceed(*args, **params)

    def changes(call, *args, **params):
        args = [arg * 2 if getattr(arg, "ndim", 0) == 3 else arg for arg in args]
        return call.proceed(*args, **params)

    expected = 2 * updated(decoded(cache), rows, x, 1)[0]
    for target in ("jax.numpy.einsum", "primitive:dot_general"):
        assert (run(lambda call, *args, **params: NotImplemented, target) == 7).all()
        assert (run(lets, target) == 7).all()
        np.testing.assert_allclose(run(changes, target), expected, rtol=1e-6)


def test_proxies_without_new_elements_stay_arrays():
    """A proxy that is not carried is followed, and not updated."""
    cache, rows, x = arguments()
    plain = Coded(cache.codes, cache.scale)
    _, held = tap(updated)[0](plain, rows, x, 1)
    assert isinstance(held, jax.Array)
    with pytest.raises(MoveError, match="Coded takes no new elements"):
        plain.encode(rows, [0, 1, 2])


def test_early_handlers_keep_their_numbers():
    """Operations that are asked about while a program is staged count before what follows."""

    @functools.partial(jax.custom_vjp)
    def scaled(x):
        return 2 * x

    scaled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))

    def fn(cache, rows, x, i):
        cache = lax.dynamic_update_slice(cache, rows[:, :1], (0, i, 0))
        grad = jax.grad(lambda x: jnp.einsum("ij,ij->", x, scaled(x)))(x)
        cache = cache.at[:, 0].set(rows[:, 2])
        return read(cache, x + grad), cache

    cache, rows, x = arguments()
    tapped, seen = tap(fn)
    plain, ids = tap(fn)
    found, _ = tapped(cache, rows, x, 1)
    expected, _ = plain(decoded(cache), rows, x, 1)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert [op_id for op_id, _ in seen] == [op_id for op_id, _ in ids]


def test_handlers_find_proxies_of_what_they_move():
    """Also as it lies in memory, before a transpose; not of what they compute."""
    found = []

    def look(call, subscripts, cache, x):
        moved = jnp.swapaxes(cache, 0, 2)[1:]
        proxy, there = call.proxy(moved), call.proxy(cache)
        found.append(proxy.restore())
        values, order = untransposed(call.proxy(jnp.swapaxes(cache, 0, 2)).codes)
        assert order == (2, 1, 0)
        assert values is there.codes
        assert call.proxy(moved + 0) is None
        return call.proceed(subscripts, cache, x) + 0 * found.pop().sum()

    cache, rows, x = arguments()
    fn = jax.jit(TraceEngine().wrap(updated, Interceptor({"jax.numpy.einsum": look})))
    result, held = fn(cache, rows, x, 1)
    np.testing.assert_allclose(result, read(held.restore(), x), rtol=1e-6, atol=1e-6)
