"""Which leaf of the arguments an operand is, and through which axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from hijax_trace.dataflow import flow
from interception_core import Interceptor, PatchEngine
from jaxtap_testkit import examples
from jaxtap_testkit.tap_helpers import ENGINE, Log, tap

pytestmark = pytest.mark.sample(2)

X = jnp.ones((2, 3))
DOT = "primitive:dot_general"


def operand(fn, *args, target=DOT, position=1, call=0, mode=lambda f: f, **kwargs):
    """Returns the provenance and the axes of an operand, the second one of the first call."""
    log = Log()
    jax.eval_shape(mode(tap(fn, log, target)), *args, **kwargs)
    found = log.operands[call][position]
    return found.provenance, found.axes


W = "args[1]"
OF_W = {
    "itself": (lambda x, w: x @ w, (3, 4), (0, 1)),
    "T": (lambda x, w: x @ w.T, (4, 3), (1, 0)),
    "transpose": (lambda x, w: x @ jnp.transpose(w, (1, 0)), (4, 3), (1, 0)),
    "swapaxes": (lambda x, w: x @ w.swapaxes(0, 1), (4, 3), (1, 0)),
    "astype": (lambda x, w: x @ w.astype(jnp.bfloat16).astype(jnp.float32), (3, 4), (0, 1)),
    "split": (lambda x, w: x @ w.reshape(3, 2, 2)[..., :].reshape(3, 4), (3, 4), (0, 1)),
    "split and kept": (
        lambda x, w: jnp.einsum("ab,bcd->acd", x, w.reshape(3, 2, 2)),
        (3, 4),
        (0, (1, 2)),
    ),
    "merged": (lambda x, w: x @ w.reshape(3, 4), (3, 2, 2), (0, 1, 1)),
    "split and merged back": (lambda x, w: x @ w.reshape(3, 2, 2).reshape(3, 4), (3, 4), (0, 1)),
    "only row": (lambda x, w: x @ w[0], (1, 3, 4), (None, 0, 1)),
    "squeeze": (lambda x, w: x @ jnp.squeeze(w, 0), (1, 3, 4), (None, 0, 1)),
    "stop_gradient": (lambda x, w: x @ lax.stop_gradient(w), (3, 4), (0, 1)),
    "jit": (lambda x, w: jax.jit(lambda a, b: a @ b)(x, w), (3, 4), (0, 1)),
    "jit of T": (lambda x, w: jax.jit(lambda a, b: a @ b.T)(x, w), (4, 3), (1, 0)),
    "T of jit": (lambda x, w: x @ jax.jit(lambda b: b.T)(w), (4, 3), (1, 0)),
    "closed over by jit": (lambda x, w: jax.jit(lambda a: a @ w)(x), (3, 4), (0, 1)),
    "jit of jit": (
        lambda x, w: jax.jit(lambda a: jax.jit(lambda b: a @ b.T)(w))(x),
        (4, 3),
        (1, 0),
    ),
    "remat": (lambda x, w: jax.checkpoint(lambda a, b: a @ b)(x, w), (3, 4), (0, 1)),
    "scan of slices": (
        lambda x, w: lax.scan(lambda c, r: (c, x @ r), 0, w)[1],
        (5, 3, 4),
        (None, 0, 1),
    ),
    "scan of slices, transposed": (
        lambda x, w: lax.scan(lambda c, r: (c, x @ r.T), 0, w)[1],
        (5, 4, 3),
        (None, 1, 0),
    ),
    "scan of scan": (
        lambda x, w: lax.scan(lambda c, r: (c, lax.scan(lambda d, s: (d, x @ s), 0, r)[1]), 0, w)[
            1
        ],
        (5, 2, 3, 4),
        (None, None, 0, 1),
    ),
    "constant of scan": (
        lambda x, w: lax.scan(lambda c, _: (c, x @ w), 0, None, length=2)[1],
        (3, 4),
        (0, 1),
    ),
    "carry that is handed on": (
        lambda x, w: lax.scan(lambda c, _: ((c[0] + 1, c[1]), x @ c[1]), (0, w), None, length=2)[1],
        (3, 4),
        (0, 1),
    ),
    "carry that is handed on, after": (
        lambda x, w: x @ lax.scan(lambda c, _: ((c[0] + 1, c[1]), None), (0, w), None, 2)[0][1],
        (3, 4),
        (0, 1),
    ),
    "carry that changes": (
        lambda x, w: lax.scan(lambda c, _: (c * 2, x @ c), w, None, length=2)[1],
        (3, 4),
        None,
    ),
    "carry that changes, after": (
        lambda x, w: x @ lax.scan(lambda c, _: (c * 2, None), w, None, length=2)[0],
        (3, 4),
        None,
    ),
    "carry that is turned": (
        lambda x, w: lax.scan(lambda c, _: (c.T, x @ c), w, None, length=2)[1],
        (3, 3),
        None,
    ),
    "carries that swap": (
        lambda x, w: lax.scan(lambda c, _: ((c[1], c[0]), x @ c[0]), (w, w + 1), None, 2)[1],
        (3, 4),
        None,
    ),
    "while": (
        lambda x, w: lax.while_loop(
            lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] + x @ w), (0, jnp.zeros((2, 4)))
        )[1],
        (3, 4),
        (0, 1),
    ),
    "cond": (
        lambda x, w: lax.cond(x[0, 0] > 0, lambda a, b: a @ b, lambda a, b: a @ b, x, w),
        (3, 4),
        (0, 1),
    ),
    "branches that agree": (
        lambda x, w: x @ lax.cond(x[0, 0] > 0, lambda b: b.T, lambda b: b.T * 1.0 if 0 else b.T, w),
        (4, 3),
        (1, 0),
    ),
    "branches that disagree": (
        lambda x, w: x @ lax.cond(x[0, 0] > 0, lambda b: b.T, lambda b: b, w),
        (3, 3),
        None,
    ),
    "branches of which one computes": (
        lambda x, w: x @ lax.cond(x[0, 0] > 0, lambda b: b * 2, lambda b: b, w),
        (3, 4),
        None,
    ),
    "computed": (lambda x, w: x @ (w + 1), (3, 4), None),
    "slice": (lambda x, w: x @ w[:3], (5, 4), None),
    "vmap over it": (lambda x, w: jax.vmap(lambda b: x @ b)(w), (5, 3, 4), (None, 0, 1)),
    "vmap over the other": (lambda x, w: jax.vmap(lambda a: a @ w)(x[:, None]), (3, 4), (0, 1)),
    "vmap over its last axis": (
        lambda x, w: jax.vmap(lambda b: x @ b, -1)(w),
        (3, 4, 5),
        (0, 1, None),
    ),
    "grad": (lambda x, w: jax.grad(lambda w: jnp.sum(x @ w))(w), (3, 4), (0, 1)),
    "grad of T": (lambda x, w: jax.grad(lambda w: jnp.sum(x @ w.T))(w), (4, 3), (1, 0)),
    "grad of jit": (
        lambda x, w: jax.grad(lambda w: jnp.sum(jax.jit(jnp.dot)(x, w)))(w),
        (3, 4),
        (0, 1),
    ),
    "custom_jvp": (lambda x, w: _custom_jvp(x, w), (3, 4), (0, 1)),
    "custom_vjp": (lambda x, w: _custom_vjp(x, w), (3, 4), (0, 1)),
    "device_put": (lambda x, w: x @ jax.device_put(w, jax.devices()[0]), (3, 4), (0, 1)),
    "optimization barrier": (lambda x, w: x @ lax.optimization_barrier((x, w))[1], (3, 4), (0, 1)),
    "broadcast": (
        lambda x, w: jnp.einsum("ab,cbd->acd", x, jnp.broadcast_to(w, (5, 3, 4))),
        (3, 4),
        (1, 2),
    ),
}


@jax.custom_jvp
def _custom_jvp(x, w):
    return x @ w


_custom_jvp.defjvp(lambda p, t: (p[0] @ p[1], t[0] @ p[1]))


@jax.custom_vjp
def _custom_vjp(x, w):
    return x @ w


_custom_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, ct: (ct @ r[1].T, r[0].T @ ct))


@pytest.mark.parametrize("name", OF_W)
def test_weight(name):
    fn, shape, expected = OF_W[name]
    provenance = None if expected is None else W
    assert operand(fn, X, jnp.ones(shape)) == (provenance, expected)


@pytest.mark.parametrize("name", ["T", "jit", "scan of slices", "grad", "vmap over it"])
def test_without_an_outer_trace(name):
    fn, shape, expected = OF_W[name]
    log = Log()
    tap(fn, log, DOT)(X, jnp.ones(shape))
    assert (log.operands[0][1].provenance, log.operands[0][1].axes) == (W, expected)


@pytest.mark.parametrize("name", OF_W)
def test_under_an_outer_vmap_of_the_input(name):
    fn, shape, expected = OF_W[name]
    if name in ("vmap over the other",):
        return
    xs, w = jnp.ones((7, 2, 3)), jnp.ones(shape)
    provenance = None if expected is None else W
    mode = lambda f: jax.vmap(f, (0, None))  # noqa: E731
    assert operand(fn, xs, w, mode=mode) == (provenance, expected)


def test_under_an_outer_vmap_of_the_weight():
    """Inside of it the weight has no such axis."""
    mode = lambda f: jax.vmap(f, (None, 0))  # noqa: E731
    found = operand(lambda x, w: x @ w, X, jnp.ones((5, 3, 4)), mode=mode)
    assert found == (W, (0, 1))


PATHS = {
    "args[0]['a']['b']": lambda w: (({"a": {"b": w}},), {}),
    "args[0][1]": lambda w: (([X, w],), {}),
    "args[1]": lambda w: ((X, w), {}),
    "kwargs['w']": lambda w: ((X,), {"w": w}),
    "kwargs['p']['w'][0]": lambda w: ((X,), {"p": {"w": (w,)}}),
}


@pytest.mark.parametrize("path", PATHS)
def test_pytree_path(path):
    w = jnp.ones((3, 4))
    args, kwargs = PATHS[path](w)

    def fn(*args, **kwargs):
        leaves = [x for x in jax.tree.leaves((args, kwargs)) if x.shape == (3, 4)]
        return X @ leaves[0]

    assert operand(fn, *args, **kwargs) == (path, (0, 1))


def test_leaf_that_is_shared():
    """The first place is what it is called by, where it is one array: under jit it is two."""
    w, log = jnp.ones((3, 4)), Log()
    tap(lambda a, b: X @ b, log, DOT)(w, w)
    assert log.operands[0][1].provenance == "args[0]"
    assert operand(lambda a, b: X @ b, w, w)[0] == "args[1]"


def test_closed_over_array_has_none():
    w = jnp.ones((3, 4))
    assert operand(lambda x: x @ w, X) == (None, None)
    assert operand(lambda x: jax.jit(lambda x: x @ w)(x), X) == (None, None)


def test_numpy_arrays_and_numbers():
    fn = lambda x, w: x @ w  # noqa: E731
    assert operand(fn, np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)) == (W, (0, 1))


def test_result_of_a_replaced_operation_has_none():
    seen = []

    def handler(call, *args, **params):
        seen.append((call.op_name, [o.provenance for o in call.operands]))
        return call.proceed(*args, **params) if call.op_name == "transpose" else NotImplemented

    tap(lambda x, w: x @ w.T, handler, DOT, "primitive:transpose")(X, jnp.ones((4, 3)))
    assert seen == [("transpose", ["args[1]"]), ("dot_general", ["args[0]", None])]


@pytest.mark.parametrize(
    "replace",
    [lambda call, w, **params: call.proceed(w, **params), lambda call, w, **params: w.T],
    ids=["as it was", "moved"],
)
def test_replaced_where_the_program_differentiates(replace):
    """Handlers are asked while it is staged, and learn the same."""
    seen = []

    def handler(call, *args, **params):
        seen.append((call.op_name, [o.provenance for o in call.operands]))
        return replace(call, *args, **params) if call.op_name == "transpose" else NotImplemented

    fn = jax.grad(lambda x, w: (x @ w.T).sum())
    tap(fn, handler, DOT, "primitive:transpose")(X, jnp.ones((4, 3)))
    assert seen[:2] == [("transpose", ["args[1]"]), ("dot_general", ["args[0]", None])]


@pytest.mark.parametrize("differentiated", [False, True])
def test_through_thousands_of_moves(differentiated):
    def program(x, w):
        for _ in range(2001):
            w = lax.transpose(w, (1, 0))
        return (x @ w).sum()

    fn = jax.grad(program) if differentiated else program
    assert operand(fn, X, jnp.ones((4, 3))) == (W, (1, 0))


def test_replaced_in_a_nested_function():
    seen = []

    def handler(call, *args, **params):
        seen.append((call.op_name, [o.provenance for o in call.operands]))
        return call.proceed(*args, **params) if call.op_name == "transpose" else NotImplemented

    turned = jax.jit(lambda w: w.T)
    tap(lambda x, w: x @ turned(w), handler, DOT, "primitive:transpose")(X, jnp.ones((4, 3)))
    assert seen[1] == ("dot_general", ["args[0]", None])


def test_replaced_before_a_nested_function():
    seen = []

    def handler(call, *args, **params):
        seen.append((call.op_name, [o.provenance for o in call.operands]))
        return call.proceed(*args, **params) if call.op_name == "transpose" else NotImplemented

    fn = lambda x, w: jax.jit(lambda a, b: a @ b)(x, w.T)  # noqa: E731
    tap(fn, handler, DOT, "primitive:transpose")(X, jnp.ones((4, 3)))
    assert seen[1] == ("dot_general", ["args[0]", None])


def test_function_level():
    seen = []

    def handler(call, *args, **kwargs):
        seen.extend((o.provenance, o.axes) for o in call.operands)
        return NotImplemented

    tap(lambda x, w: jnp.dot(x, w.T), handler, "jax.numpy.dot")(X, jnp.ones((4, 3)))
    assert seen == [("args[0]", (0, 1)), (W, (1, 0))]


def test_function_level_in_a_nested_jit_and_grad():
    seen = []

    def handler(call, *args, **kwargs):
        seen.append((call.operands[1].provenance, call.operands[1].axes))
        return NotImplemented

    block = jax.jit(lambda x, w: jnp.sum(jnp.dot(x, w.T)))
    tap(lambda x, w: block(x, w), handler, "jax.numpy.dot")(X, jnp.ones((4, 3)))
    tap(jax.grad(lambda x, w: jnp.sum(jnp.dot(x, w.T))), handler, "jax.numpy.dot")(
        X, jnp.ones((4, 3))
    )
    assert seen == [(W, (1, 0))] * 2


def test_static_argument_of_a_function_is_no_array():
    seen = []

    def handler(call, *args, **kwargs):
        seen.extend(call.operands)
        return NotImplemented

    tap(lambda x: jnp.einsum("ab->ba", x), handler, "jax.numpy.einsum")(X)
    assert [(o.shape, o.provenance) for o in seen] == [(None, None), ((2, 3), "args[0]")]


def test_two_layers_of_one_jitted_block():
    seen = []

    def handler(call, x, w, **params):
        seen.append(call.provenance(w))
        return NotImplemented

    block = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def model(params, x):
        for w in params:
            x = block(x, w)
        return x

    tap(model, handler, DOT)([jnp.eye(3)] + [jnp.ones((3, 3)) * i for i in range(3)], X)
    assert seen == [f"args[0][{i}]" for i in range(4)]


def test_provenance_of_a_key():
    log = Log()
    key = jax.random.key(0)
    tap(lambda k: jax.random.bits(k, (2,)), log, "primitive:random_bits")(key)
    assert log.operands[0][0].provenance == "args[0]"


def test_after_the_call_it_is_an_error():
    calls = []
    tap(lambda x: x @ x.T, lambda call, *a, **p: calls.append(call) or NotImplemented, DOT)(X)
    with pytest.raises(RuntimeError, match="must be read while the wrapped function runs"):
        _ = calls[0].operands


def test_tapped_twice_under_other_arguments():
    log = Log()
    fn = ENGINE.wrap(lambda *ws: lax.dot(X, ws[-1]), Interceptor({DOT: log}))
    w = jnp.ones((3, 3))
    fn(w), fn(X, w), fn(w, w)
    assert [ops[1].provenance for ops in log.operands] == ["args[0]", "args[1]", "args[0]"]


# --- the maps themselves ----------------------------------------------------------------------


def marked(shape):
    """Returns for each axis the array that varies along that axis alone, with its index."""
    return [
        np.broadcast_to(
            np.arange(n).reshape([-1 if i == a else 1 for i in range(len(shape))]), shape
        )
        for a, n in enumerate(shape)
    ]


def varies(array, axis):
    return array.shape[axis] > 1 and bool((np.diff(array, axis=axis) != 0).any())


def check(shape, after, move, found):
    """Asserts that each axis of more than one is where the map says, and in order."""
    assert found is not None
    assert len(found) == len(shape)
    for index, to in zip(marked(shape), found, strict=True):
        moved = move(index)
        assert moved.shape == tuple(after)
        places = {axis for axis in range(len(after)) if varies(moved, axis)}
        said = set() if to is None else {to} if isinstance(to, int) else set(to)
        assert places <= said
        if isinstance(to, tuple):
            assert list(to) == sorted(to)


SHAPES = st.lists(st.sampled_from([1, 1, 2, 3, 4, 6]), min_size=0, max_size=5).map(tuple)
MANY = examples(100)


@st.composite
def reshapes(draw):
    """A shape and one that it can be reshaped to by splitting, merging and adding ones."""
    before = draw(SHAPES)
    after = list(before)
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["merge", "split", "one", "drop"]))
        at = draw(st.integers(0, max(len(after) - 1, 0)))
        if kind == "merge" and len(after) > at + 1:
            after[at : at + 2] = [after[at] * after[at + 1]]
        elif kind == "split" and after and after[at] % 2 == 0:
            after[at : at + 1] = [2, after[at] // 2]
        elif kind == "one":
            after.insert(at, 1)
        elif kind == "drop" and after and after[at] == 1:
            del after[at]
    return before, tuple(after)


@MANY
@given(reshapes())
def test_reshape(shapes):
    before, after = shapes
    found = flow._reshape({"dimensions": None}, before, after)
    if found is None:  # runs of several axes that become several others
        return
    check(before, after, lambda x: x.reshape(after), found)


@MANY
@given(SHAPES)
def test_reshape_to_the_same(shape):
    assert flow._reshape({"dimensions": None}, shape, shape) == flow.identity(len(shape))


@pytest.mark.slow
@MANY
@given(SHAPES, st.data())
def test_reshape_that_only_merges_is_known(shape, data):
    if not shape:
        return
    cuts = sorted(data.draw(st.sets(st.integers(1, len(shape) - 1))) if len(shape) > 1 else [])
    groups = [shape[a:b] for a, b in zip([0, *cuts], [*cuts, len(shape)], strict=True)]
    after = tuple(int(np.prod(group)) for group in groups)
    found = flow._reshape({"dimensions": None}, shape, after)
    check(shape, after, lambda x: x.reshape(after), found)
    back = flow._reshape({"dimensions": None}, after, shape)
    check(after, shape, lambda x: x.reshape(shape), back)


@MANY
@given(SHAPES, st.data())
def test_transpose(shape, data):
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    after = tuple(shape[i] for i in order)
    found = flow._transpose({"permutation": order}, shape, after)
    check(shape, after, lambda x: x.transpose(order), found)


@MANY
@given(SHAPES, st.data())
def test_squeeze(shape, data):
    ones = [i for i, n in enumerate(shape) if n == 1]
    gone = tuple(data.draw(st.sets(st.sampled_from(ones)))) if ones else ()
    after = tuple(n for i, n in enumerate(shape) if i not in gone)
    found = flow._squeeze({"dimensions": gone}, shape, after)
    check(shape, after, lambda x: x.squeeze(gone), found)
    assert all((to is None) == (i in gone) for i, to in enumerate(found))


@pytest.mark.slow
@MANY
@given(SHAPES, st.data())
def test_broadcast(shape, data):
    after, places = [], []
    for n in shape:
        after += data.draw(st.lists(st.sampled_from([1, 2, 5]), max_size=2))
        places.append(len(after))
        after.append(data.draw(st.sampled_from([1, 3])) if n == 1 else n)
    found = flow._broadcast({"broadcast_dimensions": tuple(places)}, shape, tuple(after))

    def move(x):
        wide = [1] * len(after)
        for place, n in zip(places, shape, strict=True):
            wide[place] = n
        return np.broadcast_to(x.reshape(wide), after)

    check(shape, after, move, found)


@MANY
@given(SHAPES, st.data())
def test_composed_moves(shape, data):
    """Any chain of them: the map of the whole is right about where each axis went."""
    moved, whole = shape, flow.identity(len(shape))
    steps = []
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            order = tuple(data.draw(st.permutations(range(len(moved)))))
            after = tuple(moved[i] for i in order)
            found = flow._transpose({"permutation": order}, moved, after)
            steps.append(lambda x, order=order: x.transpose(order))
        else:
            after = tuple(n for n in moved if n != 1)
            if data.draw(st.booleans()) and len(after) > 1:
                after = (after[0] * after[1], *after[2:])
            found = flow._reshape({"dimensions": None}, moved, after)
            steps.append(lambda x, after=after: x.reshape(after))
        if found is None:
            return
        moved, whole = after, flow.compose(whole, found)

    def move(x):
        for step in steps:
            x = step(x)
        return x

    check_places(shape, moved, move, whole)


def check_places(shape, after, move, found):
    for index, to in zip(marked(shape), found, strict=True):
        result = move(index)
        places = {axis for axis in range(len(after)) if varies(result, axis)}
        assert places <= (set() if to is None else {to} if isinstance(to, int) else set(to))


@MANY
@given(SHAPES.filter(bool), st.data())
def test_dropped(shape, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    found = flow.dropped(axis, len(shape))
    after = tuple(n for i, n in enumerate(shape) if i != axis)
    for i, (index, to) in enumerate(zip(marked(shape), found, strict=True)):
        moved = np.take(index, 0, axis)
        places = {a for a in range(len(after)) if varies(moved, a)}
        assert places <= (set() if to is None else {to})
        assert (to is None) == (i == axis)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((6,), (2, 3), ((0, 1),)),
        ((2, 3), (6,), (0, 0)),
        ((1, 4), (4,), (None, 0)),
        ((4,), (1, 4), (1,)),
        ((4, 1), (4,), (0, None)),
        ((2, 3, 4), (2, 12), (0, 1, 1)),
        ((2, 12), (2, 3, 4), (0, (1, 2))),
        ((2, 3), (3, 2), None),
        ((4, 6), (6, 4), None),
        ((1, 1), (1,), (0, None)),
        ((), (1,), ()),
        ((0, 4), (0,), None),
    ],
)
def test_reshape_of(before, after, expected):
    found = flow._reshape({"dimensions": None}, before, after)
    if 0 in before:  # nothing to follow, and nothing that may go wrong
        assert found is None or len(found) == len(before)
    else:
        assert found == expected


@jax.tree_util.register_pytree_node_class
class Variable:
    """An object that JAX's functions take for an array, as those of Flax NNX."""

    def __init__(self, value):
        self._value = value

    def __jax_array__(self):
        return self._value

    @property
    def aval(self):
        return jax.typeof(self._value)  # Flax's variables have all attributes of their arrays

    def tree_flatten(self):
        return (self._value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.sample(1)
@pytest.mark.parametrize("engine", [ENGINE, PatchEngine()], ids=["trace", "patch"])
def test_an_object_with_an_array_is_that_array_to_handlers(engine):
    seen = []

    def handler(call, *args, **kwargs):
        seen.append((call.op_name, [operand.provenance for operand in call.operands]))
        return call.proceed(*args, **kwargs)

    def program(w, x):
        v = Variable(w)
        y = jnp.einsum("bi,ij->bj", x, v) + jnp.matmul(a=x, b=v) + jnp.dot(x, v)
        return y + jnp.concatenate([v, v])[:2, :4] + jnp.inner(x, Variable(w.T))

    targets = ["einsum", "matmul", "dot", "concatenate", "inner"]
    handlers = {f"jax.numpy.{name}": handler for name in targets}
    tapped = engine.wrap(program, Interceptor(handlers))
    w, x = jnp.arange(12.0).reshape(3, 4), jnp.ones((2, 3))
    assert (tapped(w, x) == program(w, x)).all()
    assert [name for name, _ in seen] == targets
    for name, paths in seen:
        if name in ("einsum", "dot"):
            assert paths[-2:] == ["args[1]", "args[0]"]
