"""Delayed scaling: the scales of a step follow from the steps before it, forward and backward."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import provider_xla as xla
import quant_numerics as qn
from interception_core import JaxtapError
from jaxtap_testkit.meshes import grid, line, put
from jaxtap_testkit.xla_samples import PROGRAMS, draw, make

HISTORY = qn.AmaxHistory(3)
RULE = xla.QtRule(
    weight_qtype="float8_e4m3fn",
    act_qtype="float8_e4m3fn",
    bwd_qtype="float8_e5m2",
    act_static_scale=True,
    weight_static_scale=True,
    bwd_static_scale=True,
    static_average=HISTORY,
)
KEYS = ["dot_general:0#gradient", "dot_general:0#lhs", "dot_general:0#rhs"]


def product(w, x):
    return lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))


def started(fn, *args, rule=RULE):
    provider = xla.QtProvider(rule)
    statistics = provider.init_statistics(fn, *args)
    return provider.apply(fn, statistics), statistics


def ranges(statistics):
    return {key: np.asarray(one.calibration().upper).ravel() for key, one in statistics.items()}


class Recipe:
    """Delayed scaling of one array, in NumPy: its products are exact in float64."""

    def __init__(self, dtype):
        self.dtype, self.largest = dtype, np.float32(ml_dtypes.finfo(dtype).max)
        self.past, self.bound = [], self.largest

    def quantized(self, x):
        scale = np.maximum(self.bound / self.largest, np.finfo(np.float32).tiny)
        x = np.where(np.isfinite(x), x, np.nan)
        with np.errstate(over="ignore"):
            values = np.clip(np.float32(x) / scale, -self.largest, self.largest)
        amax = np.abs(x).max()
        self.past = [amax if np.isfinite(amax) else np.float32(0), *self.past][: HISTORY.length]
        self.bound = max(self.past) or self.bound
        return values.astype(self.dtype).astype(np.float64) * np.float64(scale)


# Of the activation, the weight and the incoming gradient, step by step. The first step has scale 1;
# then magnitudes grow, fall, vanish, are huge and not finite.
FACTORS = np.array(
    [(1, 1, 1), (2, 1, 1e3), (0.1, 2, 1), (0, 1, 0), (1, 1, 1), (1e12, 0, 1e-20), (1, 1, 1),
     (np.inf, 1, 1), (1, 1, np.nan), (1, 1, 1), (1, 1, 1)],
    np.float32,
)  # fmt: skip


def test_steps_are_those_of_the_recipe():
    (w,), (x,), (g,) = draw((8, 6)), draw((4, 8), seed=1), draw((4, 6), seed=2)
    fn, statistics = started(product, w, x)
    assert sorted(statistics) == KEYS
    traces = []

    @jax.jit
    def step(w, x, g):
        traces.append(None)
        y, pull = jax.vjp(fn, w, x)
        return (y, *pull(g))

    e4m3, e5m2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    lhs, rhs, gradient = Recipe(e4m3), Recipe(e4m3), Recipe(e5m2)
    for scales in FACTORS:
        one = [
            np.where(a == a.max(), a * f, a) if not np.isfinite(f) else a * f
            for a, f in zip((x, w, g), scales, strict=True)
        ]
        y, dw, dx = step(one[1], one[0], one[2])
        with np.errstate(invalid="ignore"):
            qx, qw, qg = (
                recipe.quantized(a) for recipe, a in zip((lhs, rhs, gradient), one, strict=True)
            )
            wanted = qx @ qw, qx.T @ qg, qg @ qw.T
        for found, exact in zip((y, dw, dx), wanted, strict=True):
            np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-5 * _largest(exact))
        expected = dict(zip(KEYS, (gradient.bound, lhs.bound, rhs.bound), strict=True))
        found = ranges(statistics)
        np.testing.assert_allclose([found[key] for key in KEYS], [[expected[k]] for k in KEYS])
    assert len(traces) == 1
    assert all(int(one.count) == HISTORY.length for one in statistics.values())


def _largest(x):
    return np.abs(x[np.isfinite(x)]).max(initial=0)


def test_a_step_that_overflows_says_so_and_changes_no_other():
    def fn(w, x):
        return jnp.tanh(x @ w) @ w

    w, x = draw((8, 8), (4, 8))
    apply, statistics = started(fn, w, x)
    grad = jax.jit(jax.grad(lambda w, x, scale: scale * jnp.sum(apply(w, x) ** 2)))
    for _ in range(2):
        grad(w, x, 1.0)
    known = ranges(statistics)
    for scale, at in ((jnp.inf, 0.0), (1.0, jnp.inf), (1.0, jnp.nan)):
        assert not np.isfinite(grad(w, x.at[0, 0].add(at), scale)).any()
        np.testing.assert_equal(ranges(statistics), known)


def test_products_are_of_float8_and_no_scale_waits_for_its_step():
    """Without the reductions, which only the next step needs, nothing else reads the arrays."""
    (w,), (x,), (g,) = draw((8, 6)), draw((4, 8), seed=1), draw((4, 6), seed=2)
    rule = dataclasses.replace(RULE, static_average=qn.AmaxHistory())
    provider = xla.QtProvider(rule)
    statistics = provider.init_statistics(product, w, x)
    fixed = {key: qn.Calibration(None, one.calibration().upper + 2) for key, one in
             statistics.items()}  # fmt: skip

    def step(w, x, g, fixed):
        y, pull = jax.vjp(provider.apply(product, fixed, update=False), w, x)
        return (y, *pull(g))

    lowered = jax.jit(step).trace(w, x, g, fixed).lower(lowering_platforms=("cuda",)).as_text()
    dots = [line for line in lowered.splitlines() if "dot_general" in line]
    assert len(dots) == 3
    assert all(line.count("f8E") == 2 for line in dots)
    # Ranges that are arguments may be unseen, and activations then measure their own.
    text = jax.jit(lambda *a: step(*a, fixed)).lower(w, x, g).as_text()
    reduced = [line for line in text.splitlines() if "stablehlo.reduce(" in line]
    assert all("(tensor<1x1xf32>" in line for line in reduced)  # of scales alone


def layers(w, x, wrap=lambda body: body):
    """A scan of three layers, with a history each."""

    def body(x, w):
        return jnp.tanh(product(w, x)), None

    return lax.scan(wrap(body), x, w)[0]


def written_out(w, x):
    for one in w:
        x = jnp.tanh(product(one, x))
    return x


@pytest.mark.parametrize("wrap", [lambda body: body, jax.checkpoint], ids=["plain", "remat"])
def test_steps_of_a_scan_have_a_history_each(wrap):
    (w,), (x,) = draw((3, 8, 8)), draw((4, 8), seed=1)
    results = []
    for fn in (lambda w, x: layers(w, x, wrap), written_out):
        loss, statistics = started(fn, w, x)
        step = jax.jit(jax.value_and_grad(lambda w, x, loss=loss: (loss(w, x) ** 2).sum()))
        for factor in (1, 3, 0.5):
            found = step(w, np.float32(factor) * x)
        results.append((found, ranges(statistics)))
    (one, of_steps), (two, alone) = results
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, two)
    for key, found in of_steps.items():
        side = key.partition("#")[2]
        expected = [alone[f"dot_general:{i}#{side}"][0] for i in range(3)]
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=key)


def gradients(fn, w, x, transform=lambda loss: jax.jit(jax.grad(loss)), rule=RULE):
    """Return the gradient of the last of three steps, and all ranges."""
    apply, statistics = started(fn, w, x, rule=rule)
    step = transform(lambda w, x: (apply(w, x) ** 2).sum())
    for factor in (1, 3, 0.5):
        found = step(w, np.float32(factor) * x)
    return found, ranges(statistics)


def layer(w, x):
    return jnp.tanh(product(w, x))


TRANSFORMED = {
    "grad of jit": (layer, lambda loss: jax.grad(jax.jit(loss))),
    "remat": (layer, lambda loss: jax.jit(jax.grad(jax.checkpoint(loss)))),
    "not compiled": (layer, jax.grad),
    "vmap": (
        lambda w, x: jax.vmap(layer, (None, 0))(w, x[:, None])[:, 0],
        lambda loss: jax.jit(jax.grad(loss)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", TRANSFORMED)
def test_under_transformations(how):
    """Gradients and histories are those of the plain program."""
    (w,), (x,) = draw((8, 8)), draw((4, 8), seed=1)
    fn, transform = TRANSFORMED[how]
    found, seen = gradients(fn, w, x, transform)
    wanted, expected = gradients(layer, w, x)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert seen.keys() == expected.keys()
    for key in seen:
        np.testing.assert_allclose(seen[key], expected[key], rtol=1e-5, err_msg=key)


@pytest.mark.slow
def test_steps_of_a_loop_may_share_a_history():
    """It holds the largest of each."""
    (w,), (x,) = draw((8, 8)), draw((4, 8), seed=1)

    def scanned(w, x):
        return lax.scan(lambda x, _: (layer(w, x), None), x, length=2)[0]

    _, joined = gradients(scanned, w, x, rule=dataclasses.replace(RULE, static_range="joined"))
    _, alone = gradients(lambda w, x: layer(w, layer(w, x)), w, x)
    assert len(joined) == 3
    for key, found in joined.items():
        side = key.partition("#")[2]
        largest = max(alone[f"dot_general:{i}#{side}"] for i in range(2))
        # Other scales, other roundings.
        np.testing.assert_allclose(found, largest, rtol=0.1, err_msg=key)


def test_accumulated_gradients_and_calls_without_a_backward_pass():
    (w,), xs = draw((8, 8)), draw((4, 2, 8), seed=1)[0]
    factors = np.array([1, 4, 2, 1], np.float32)
    xs = xs * factors[:, None, None]

    def loss_of(w, x):
        return (product(w, x) ** 2).sum()

    together, statistics = started(loss_of, w, xs[0])
    one_by_one, alone = started(loss_of, w, xs[0])

    @jax.jit
    def accumulated(w, xs):
        step = lambda total, x: (total + jax.grad(together)(w, x), None)  # noqa: E731
        return lax.scan(step, jnp.zeros_like(w), xs)[0]

    found = accumulated(w, xs)
    single, forward = jax.jit(jax.grad(one_by_one)), jax.jit(one_by_one)
    wanted = sum(single(w, x) for x in xs)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    for key, value in ranges(alone).items():
        np.testing.assert_array_equal(ranges(statistics)[key], value)
    # A call that is not differentiated says nothing of gradients, and forgets none.
    before = alone[KEYS[0]].state
    for _ in range(HISTORY.length + 1):
        forward(w, xs[0])
    after = alone[KEYS[0]].state
    np.testing.assert_array_equal(after.bounds.upper, before.bounds.upper)
    assert (after.past.upper >= 0).sum() >= HISTORY.length - 1
    assert ranges(alone)[KEYS[1]] == np.abs(xs[0]).max()


def test_on_a_mesh_the_largest_of_all_devices_counts():
    (w,), (x,) = draw((8, 8)), draw((16, 8), seed=1)
    x = x * np.linspace(0.1, 4, 16, dtype=np.float32)[:, None]
    results = []
    for mesh in (None, grid((4, 2), ("a", "b"))):
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            given = x if mesh is None else put(mesh, x, "a")
            results.append(gradients(product, w, given))
    (one, alone), (two, meshed) = results
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)
    for key in KEYS:
        np.testing.assert_allclose(meshed[key], alone[key], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("kind", ["delayed", "averaged"])
def test_in_the_program_of_one_device_all_devices_agree(kind, check):
    (w,), (x,) = draw((8, 8)), draw((16, 8), seed=1)
    x = x * np.linspace(0.1, 4, 16, dtype=np.float32)[:, None]
    averaged = xla.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    provider = xla.QtProvider(RULE if kind == "delayed" else averaged)

    def slope(w, x, statistics):
        apply = provider.apply(product, statistics)
        return jax.grad(lambda w: (apply(w, x) ** 2).sum())(w)

    def summed(w, x, statistics):
        found = slope(w, x, statistics)
        return found if check else lax.psum(found, "a")

    mesh = grid((4, 2), ("a", "b"))
    results = []
    for split in (False, True):
        with jax.set_mesh(mesh) if split else contextlib.nullcontext():
            statistics = provider.init_statistics(product, w, x[:4] if split else x)
            step = slope
            if split:
                specs = P(), P("a"), P()
                step = jax.shard_map(summed, in_specs=specs, out_specs=P(), check_vma=check)
            for factor in (1, 3, 1):
                found = jax.jit(step)(w, np.float32(factor) * x, statistics)
        results.append((np.asarray(found), ranges(statistics)))
    (one, alone), (two, split) = results
    assert alone.keys() == split.keys()
    for key in alone:
        np.testing.assert_allclose(split[key], alone[key], rtol=1e-6, err_msg=key)
    # Rows of int8 activations have a scale each, but for static ones.
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)


# Without lookups, which have no contraction, and what JAX can't differentiate: a loop of unknown
# length, and a branch that writes to statistics.
TRAINED = sorted(PROGRAMS.keys() - {"tied", "indexed", "while", "cond"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine"),
    [(name, "trace") for name in TRAINED] + [("convolution", "patch"), ("heads", "patch")],
)
def test_all_kinds_of_operations(name, engine):
    fn, params, x = make(name)
    params = jax.tree.map(lambda leaf: 0.4 * leaf, params)
    provider = xla.QtProvider(dataclasses.replace(RULE, weights_only=False), engine=engine)
    statistics = provider.init_statistics(fn, params, x)

    def slope(fn):
        return lambda p, x: jax.grad(lambda p: (fn(p, x).astype(jnp.float32) ** 2).sum())(p)

    step = slope(provider.apply(fn, statistics))
    step = step if engine == "patch" else jax.jit(step)
    for _ in range(2):
        found = step(params, x)
    assert {key.partition("#")[2] for key in statistics} == {"lhs", "rhs", "gradient"}
    assert all(int(one.count) == 2 for one in statistics.values())
    distance = [
        np.linalg.norm(np.concatenate([np.ravel(np.asarray(one, np.float64)) for one in leaves]))
        for leaves in (
            jax.tree.leaves(jax.tree.map(lambda a, b: a - b, found, slope(fn)(params, x))),
            jax.tree.leaves(slope(fn)(params, x)),
        )
    ]
    assert distance[0] < 0.4 * distance[1]


def test_branches_train_with_ranges_that_are_given():
    fn, w, x = make("cond")
    provider = xla.QtProvider(RULE)
    keys = provider.init_statistics(fn, w, x)
    given = {key: qn.Calibration(None, one.calibration().upper + 64) for key, one in keys.items()}
    assert len(given) == 6
    apply = provider.apply(fn, given, update=False)
    found, wanted = (jax.jit(jax.grad(lambda w, f=f: (f(w, x) ** 2).sum()))(w) for f in (apply, fn))
    assert np.linalg.norm(found - wanted) < 0.2 * np.linalg.norm(wanted)


def branch(w, x):
    return lax.cond(x.sum() > 0, product, lambda w, x: x, w, x)


UNRECORDED = {
    "cond": (branch, r"cond\(product\)/dot_general:0 can't be recorded in a lax.cond"),
    "scan in a switch": (
        lambda w, x: lax.switch(1, [lambda w, x: x, lambda w, x: layers(w[None], x)], w, x),
        r"scan\(body\)/dot_general:0 can't be recorded in a lax.cond or lax.switch",
    ),
    "while_loop": (
        lambda w, x: lax.while_loop(lambda c: c[1] < 2, lambda c: (product(w, c[0]), c[1] + 1),
                                    (x, 0))[0],
        "can't be recorded in a loop of unknown length",
    ),
    "fori_loop": (
        lambda w, x: lax.fori_loop(0, x.sum().astype(int), lambda i, x: product(w, x), x),
        "can't be recorded in a loop of unknown length",
    ),
    "shard_map": (
        lambda w, x: jax.shard_map(product, mesh=line(size=1), in_specs=(P(), P("d")),
                                   out_specs=P("d"))(w, x),
        "can't be recorded in a shard_map. Apply the provider inside",
    ),
    "second derivative": (
        lambda w, x: jax.grad(lambda w: (product(w, x) ** 2).sum())(w),
        "dot_general:0 can't have a second derivative",
    ),
}  # fmt: skip


@pytest.mark.parametrize("where", UNRECORDED)
def test_where_gradients_can_not_be_recorded(where):
    """A call that is not differentiated is right, and a derivative names the field."""
    fn, message = UNRECORDED[where]
    (w,), (x,) = draw((4, 4)), draw((2, 4), seed=1)
    apply, statistics = started(fn, w, np.abs(x))
    first = jax.jit(apply)(w, np.abs(x))  # of the first step, with scales of 1
    assert np.linalg.norm(first - jax.jit(fn)(w, np.abs(x))) < 0.2 * np.linalg.norm(first)
    assert all(int(one.count) for key, one in statistics.items() if "#gradient" not in key)
    slope = jax.grad(lambda w: (apply(w, np.abs(x)) ** 2).sum())
    for differentiate in (slope, jax.jit(slope)):
        with pytest.raises(xla.QuantizationError, match=f"With bwd_static_scale=True.*{message}"):
            differentiate(w)


def test_functions_of_the_program_with_derivative_rules():
    (w,), (x,) = draw((8, 8)), draw((4, 8), seed=1)
    forward = jax.custom_jvp(product)
    forward.defjvp(lambda p, t: (product(*p), product(p[0], t[1]) + product(t[0], p[1])))
    backward = jax.custom_vjp(product)
    backward.defvjp(lambda w, x: (product(w, x), (w, x)), lambda kept, g: (
        kept[1].T @ g, g @ kept[0].T))  # fmt: skip
    for fn in (forward, backward):
        found, _ = gradients(fn, w, x)
        exact = jax.jit(jax.grad(lambda w: (product(w, x / 2) ** 2).sum()))(w)
        assert np.linalg.norm(found - exact) < 0.2 * np.linalg.norm(exact)


def test_forward_mode_does_not_record():
    (w,), (x,) = draw((8, 8)), draw((4, 8), seed=1)
    apply, _ = started(product, w, x)
    with pytest.raises(xla.QuantizationError, match=r"under jax\.jvp, got dot_general:0"):
        jax.jvp(lambda w: apply(w, x), (w,), (w,))


def test_ranges_in_loops_that_end_apart():
    """Examples of vmap would add to one history at different steps."""
    (w,), (x,) = draw((4, 4)), draw((2, 2, 4), seed=1)

    def fn(w, x):
        return lax.fori_loop(0, x.sum().astype(int), lambda i, x: product(w, x), x)

    apply, _ = started(fn, w, x[0])
    with pytest.raises(xla.QuantizationError, match="ends at another step for each example"):
        jax.vmap(apply, (None, 0))(w, x)


def test_two_calls_before_one_backward_pass():
    """They share a step: the histories of gradients hold the larger one."""
    (w,), (x,) = draw((8, 8)), draw((4, 8), seed=1)
    apply, statistics = started(product, w, x)

    def loss(w):
        return (apply(w, x) + 5 * apply(w, 2 * x)).sum()

    jax.jit(jax.grad(loss))(w)
    assert int(statistics[KEYS[0]].count) == 1
    assert ranges(statistics)[KEYS[0]] == 5
    assert int(statistics[KEYS[1]].count) == 2


@pytest.mark.slow
def test_training_goes_on_from_a_file(tmp_path):
    (w,), (x,) = draw((8, 6)), draw((4, 8), seed=1)

    def steps(statistics, w, count):
        loss = xla.QtProvider(RULE).apply(product, statistics)
        step = jax.jit(lambda w: w - 0.1 * jax.grad(lambda w: (loss(w, x) ** 2).mean())(w))
        for _ in range(count):
            w = step(w)
        return w

    _, through = started(product, w, x)
    wanted = steps(through, w, 5)
    _, statistics = started(product, w, x)
    half = steps(statistics, w, 2)
    xla.save(tmp_path / "step", {"w": half}, extra={"statistics": statistics})
    loaded = xla.load_extra(tmp_path / "step")["statistics"]
    found = steps(loaded, xla.load(tmp_path / "step")["w"], 3)
    np.testing.assert_array_equal(found, wanted)
    for key, one in through.items():
        jax.tree.map(np.testing.assert_array_equal, loaded[key].state, one.state)
    # The rule, too.
    plan = xla.PtqProvider(RULE).plan(product, w, x)
    xla.save(tmp_path / "plan", plan.quantize(w), plan)
    (rule,) = xla.read_manifest(tmp_path / "plan").rules()
    assert rule == RULE
    # What training has seen of activations is what inference uses.
    run = jax.jit(plan.apply(product, loaded))
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    assert np.abs(run(plan.quantize(w), x) - exact).max() < 0.1 * np.abs(exact).max()


@pytest.mark.slow
def test_a_model_learns_as_with_scales_of_each_step():
    """Two layers on a fixed problem; weights grow, so that old ranges cut some of them off."""
    (a, b), (x,), (t,) = draw((8, 16), (16, 4)), draw((64, 8), seed=1), draw((8, 4), seed=2)
    y = np.tanh(x @ t)

    def loss(p, x, y):
        return ((product(p[1], jnp.tanh(product(p[0], x))) - y) ** 2).mean()

    def trained(rule):
        provider = xla.QtProvider(rule)
        p = (0.1 * a, 0.1 * b)
        statistics = provider.init_statistics(loss, p, x, y) if rule.is_static else None
        fn = provider.apply(loss, statistics)
        step = jax.jit(lambda p: jax.tree.map(lambda w, g: w - 0.5 * g, p, jax.grad(fn)(p, x, y)))
        for _ in range(150):
            p = step(p)
        return float(loss(p, x, y))

    each = dataclasses.replace(
        RULE, act_static_scale=None, weight_static_scale=False, bwd_static_scale=False,
        static_average=qn.MovingAverage(),
    )  # fmt: skip
    start = float(loss((0.1 * a, 0.1 * b), x, y))
    delayed, current = trained(RULE), trained(each)
    assert current < 0.1 * start
    assert delayed < 1.3 * current


@pytest.mark.parametrize("fields", [
    {"bwd_static_scale": False}, {"act_static_scale": None},
    {"act_static_scale": None, "weight_static_scale": False},
], ids=["not gradients", "not activations", "gradients alone"])  # fmt: skip
def test_each_operand_may_be_delayed_alone(fields):
    (w,), (x,) = draw((8, 6)), draw((4, 8), seed=1)
    rule = dataclasses.replace(RULE, **fields)
    apply, statistics = started(product, w, x, rule=rule)
    sides = {"gradient": rule.bwd_static_scale, "lhs": rule.act_static_scale,
             "rhs": rule.weight_static_scale}  # fmt: skip
    assert sorted(statistics) == [f"dot_general:0#{side}" for side in sides if sides[side]]
    jax.jit(jax.grad(lambda w: (apply(w, x) ** 2).sum()))(w)
    assert all(int(one.count) == 1 for one in statistics.values())


def test_averages_of_other_lengths():
    """What delayed scaling is chosen by, for activations and parameters in any format."""
    (w,), (x,) = draw((8, 6)), draw((4, 8), seed=1)
    rule = xla.QtRule(
        weight_qtype="int8",
        act_qtype="int8",
        act_static_scale=True,
        weight_static_scale=True,
        static_average=qn.MovingAverage(0.5),
    )
    apply, statistics = started(product, w, x, rule=rule)
    apply = jax.jit(apply)
    for factor in (1, 2, 4):
        apply(w, np.float32(factor) * x)
    largest, weights = np.abs(x).max(1).mean(), np.array([1, 2, 4]) / 7
    found = ranges(statistics)
    np.testing.assert_allclose(found[KEYS[1]], largest * weights @ [1, 2, 4], rtol=1e-5)
    np.testing.assert_allclose(found[KEYS[2]], np.abs(w).max(), rtol=1e-5)


def test_a_gradient_whose_range_is_not_known():
    (w,), (x,) = draw((8, 6)), draw((4, 8), seed=1)
    update, statistics = started(product, w, x)
    update(w, x)  # without a backward pass
    provider = xla.QtProvider(RULE)
    fn = provider.apply(product, statistics, update=False)
    with pytest.warns(xla.QuantizationWarning, match="or its gradient was 0 in all of them"):
        found = jax.grad(lambda w: (fn(w, x) ** 2).sum())(w)
    exact = 2 * x.T @ (x @ w)
    assert np.linalg.norm(found - exact) < 0.1 * np.linalg.norm(exact)
    for given in ({}, None):
        with pytest.raises(JaxtapError, match=r"[Tt]here are no statistics"):
            provider.apply(product, given)(w, x)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"static_average": qn.MovingAverage()}, "static_average must be .*AmaxHistory where bwd_"),
        ({"static_average": 1024}, "static_average must be a quant_numerics.MovingAverage or Amax"),
        ({"act_qtype": "int8"}, "act_qtype must be 'float8_e4m3fn' or .*Got 'int8'"),
        ({"weight_qtype": "mxfp8"}, "weight_qtype must be 'float8_e4m3fn' or .*Got 'mxfp8'"),
        ({"bwd_qtype": None}, "bwd_static_scale must be False where no bwd_qtype is given"),
        ({"bwd_act_grad_qtype": "int8"}, "bwd_qtype must be 'float8_e4m3fn' or"),
        ({"bwd_act_grad_tile_size": 4}, "bwd_act_grad_tile_size must be None where bwd_static"),
        ({"bwd_calibration_method": "rms,7"}, "bwd_calibration_method must be 'absmax' where"),
        ({"act_calibration_method": "rms,7"}, "act_calibration_method must be 'absmax' where"),
        ({"weight_qtype": None}, "weight_static_scale must be False where weight_qtype is None"),
        ({"bwd_static_scale": "yes"}, "bwd_static_scale must be True or False. Got 'yes'"),
        ({"bwd_static_scale": False, "act_static_scale": None, "weight_static_scale": False},
         "static_average must be left out where neither"),
    ],
)  # fmt: skip
def test_rules_that_mean_nothing_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(RULE, **fields)
