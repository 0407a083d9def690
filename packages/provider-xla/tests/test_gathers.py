"""Training gathers quantized weights: what all-gather moves, and the numbers without a mesh."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import provider_xla as xla
import quant_numerics as qn
from jaxtap_testkit.collectives import collectives
from jaxtap_testkit.meshes import put
from jaxtap_testkit.xla_samples import draw

# More rows than those of activations, so that a gathered activation is no weight.
K, N, ROWS = 256, 64, 16
QAT: dict[str, Any] = {"weight_qtype": "int8", "bwd_original_residuals": False}
RULES: dict[str, dict[str, Any]] = {
    "qat": QAT,
    "qat int4 in tiles": {**QAT, "weight_qtype": "int4", "tile_size": 32},
    "qat with zero points": {**QAT, "weight_calibration_method": "minmax"},
    "int8": {"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8"},
    "fp8": {
        "weight_qtype": "float8_e4m3fn",
        "act_qtype": "float8_e4m3fn",
        "bwd_qtype": "float8_e5m2",
    },
}
BALANCED = {**QAT, "weight_calibration_method": "balanced"}


def alone(w, x):
    """Return the program of one device."""
    return x @ w


def constrained(mesh, w, x):
    return x @ lax.with_sharding_constraint(w, NamedSharding(mesh, P(None, "model")))


def cast_alone(w, x):
    return x @ w.T.astype(jnp.bfloat16).astype(jnp.float32).T


def cast_and_turned(mesh, w, x):
    gathered = lax.with_sharding_constraint(w.T, NamedSharding(mesh, P("model", None)))
    return x @ gathered.astype(jnp.bfloat16).astype(jnp.float32).T


def in_scan(mesh, w, x):
    def layer(x, w):
        return x + 0 * constrained(mesh, w, x).sum(), constrained(mesh, w, x)

    return lax.scan(jax.checkpoint(layer), x, w[None])[1][0]


def in_shards(axis, mesh, w, x):
    """Return a program whose devices gather rows (0) or columns (1) of a weight."""
    spec = P("data") if axis == 0 else P(None, "data")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec, P("data")), out_specs=P("data"))
    def one(w, x):
        return x @ lax.all_gather(w, "data", axis=axis, tiled=True)

    return one(w, x)


def whole_in_shards(mesh, w, x):
    """Return the program of devices that have the whole weight: each quantizes its gradient."""
    specs = P(), P("data")
    one = jax.shard_map(alone, mesh=mesh, in_specs=specs, out_specs=P("data"))
    return one(w, x)


# A program, how its weight is sharded, and the same without a gather.
WAYS = {
    "constrained": (constrained, ("data", "model"), lambda mesh: alone),
    "cast and turned": (cast_and_turned, ("data", "model"), lambda mesh: cast_alone),
    "in a scan": (in_scan, ("data", "model"), lambda mesh: alone),
    "rows of shards": (
        functools.partial(in_shards, 0),
        ("data", None),
        lambda mesh: functools.partial(whole_in_shards, mesh),
    ),
    "columns of shards": (
        functools.partial(in_shards, 1),
        (None, "data"),
        lambda mesh: functools.partial(whole_in_shards, mesh),
    ),
}


def sample(mesh, spec):
    (w,), (x,), (g,) = draw((K, N)), draw((ROWS, K), seed=1), draw((ROWS, N), seed=2)
    # Rows of one device are larger: its scales are not those of the others.
    w = w.astype(jnp.bfloat16).astype(jnp.float32).at[: K // 4].multiply(3)
    return (w, x, g), (put(mesh, w, *spec), put(mesh, x, "data"), put(mesh, g, "data"))


def step(fn):
    """Return a function of w, x and g: the result, and its gradients for both."""

    def run(w, x, g):
        y, pull = jax.vjp(fn, w, x)
        return y, *pull(g)

    return run


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("way", "rule"),
    # Each way and each rule once in the default tier.
    [(w, r) for i, r in enumerate(RULES) for w in (*[*WAYS][i:], *[*WAYS][:i])],
)
def test_devices_gather_quantized_weights(way, rule, mesh):
    gathers_quantized(way, RULES[rule], mesh)


def test_balanced_weights_are_quantized_before_columns_are_gathered(mesh):
    """A device has whole columns, of which the errors cancel; of rows it has parts."""
    gathers_quantized("columns of shards", BALANCED, mesh)


def gathers_quantized(way, rule, mesh):
    fn, spec, plain = WAYS[way]
    whole, cut = sample(mesh, spec)
    provider = xla.QtProvider(xla.QtRule(**rule))
    wanted = jax.jit(step(provider.apply(plain(mesh))))(*whole)
    run = jax.jit(step(provider.apply(functools.partial(fn, mesh))))
    moved = collectives(run.lower(*cut).compile())
    floats = sum(size for (kind, of), size in moved.items() if (kind, of) == ("all-gather", "f32"))
    # Scales of tiles are gathered in float32, as are rows of activations: less than a weight.
    assert floats < 4 * K * N // 8 + 4 * K * ROWS, moved
    # XLA on CPU, which has no float8, moves it as float16.
    quantized = moved.get(("all-gather", "f16" if rule is RULES["fp8"] else "s8"), 0)
    assert quantized >= K * N // 4, moved
    for ours, theirs in zip(run(*cut), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5 * np.abs(theirs).max())


def rounded(w):
    """Return an int8 weight with a scale for each column, in float64."""
    scale = np.abs(w).max(0, keepdims=True) / 127
    return np.round(w / scale) * scale


# What devices make of the rows that they have, and the weight that it is.
COMPUTED = {
    "scaled": (lambda w: 2 * lax.all_gather(w, "data", tiled=True), lambda w: 2 * w),
    "summed": (
        lambda w: (lambda whole: whole + whole[::-1])(lax.all_gather(w, "data", tiled=True)),
        lambda w: w + w[::-1],
    ),
    "sums of devices": (
        lambda w: lax.psum(jnp.tile(w, (2, 1)), "data"),
        lambda w: np.tile(w.reshape(2, K // 2, N).sum(0), (2, 1)),
    ),
    "passed on": (
        lambda w: 3 * lax.all_gather(lax.ppermute(w, "data", [(0, 1), (1, 0)]), "data", tiled=True),
        lambda w: 3 * np.roll(w, K // 2, 0),
    ),
    "a device's factor": (
        lambda w: lax.all_gather(
            w * (1 + lax.axis_index("data")).astype(w.dtype), "data", tiled=True
        ),
        lambda w: w * np.repeat([1, 2], K // 2)[:, None],
    ),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_weights_that_are_computed_of_what_devices_exchange(name, mesh):
    compute, wanted = COMPUTED[name]

    def one(w, x):
        return x @ compute(w)

    fn = jax.shard_map(one, mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), check_vma=False)
    (w,), (x,) = draw((K, N)), draw((ROWS, K), seed=1)
    y = jax.jit(xla.QtProvider(xla.QtRule(weight_qtype="int8")).apply(fn))(w, x)
    reference = np.asarray(x, np.float64) @ rounded(wanted(np.asarray(w, np.float64)))
    # The float product, whose weight is not rounded, is hundreds of times as far away.
    np.testing.assert_allclose(y, reference, rtol=2e-5, atol=2e-5 * np.abs(reference).max())
    # Before it runs nobody knows such a weight, so that it can't be stored.
    with pytest.warns(xla.QuantizationWarning):
        plan = xla.PtqProvider(xla.QuantizationRule(weight_qtype="int8")).plan(fn, w, x)
    assert not plan.weights
    assert any("can't be stored" in problem for problem in plan.problems)


@pytest.mark.parametrize(
    ("axis", "shape", "rule"),
    [
        (0, (64, N), {**QAT, "tile_size": 32}),
        (0, (64, N), {**QAT, "tile_size": 32, "weight_calibration_method": "minmax"}),
        (0, (2, N), QAT),
        (1, (K, 2), QAT),
        (1, (K, 2), RULES["fp8"]),
    ],
    ids=["a tile", "a tile with zero points", "a row", "a column", "a column of fp8"],
)
def test_parts_with_one_element_along_the_axis(axis, shape, rule, mesh):
    """One scale of a device is not one for all devices."""
    size = mesh.shape["data"]
    assert shape[axis] in (size, 32 * size)
    ws, (x,) = draw(shape), draw((ROWS, shape[0]), seed=1)
    w = ws[0].at[0].multiply(5).at[:, 0].multiply(3)
    provider = xla.QtProvider(xla.QtRule(**rule))
    spec = ("data", None) if axis == 0 else (None, "data")
    run = jax.jit(provider.apply(functools.partial(in_shards, axis, mesh)))
    ours = run(put(mesh, w, *spec), put(mesh, x, "data"))
    theirs = jax.jit(provider.apply(functools.partial(whole_in_shards, mesh)))(w, x)
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5 * np.abs(theirs).max())


def test_infinite_weights_show_in_a_static_range(mesh):
    """A range that was measured before would hide them, as float8 saturates."""
    rule = xla.QtRule(**RULES["fp8"], weight_static_scale=True, static_average=qn.AmaxHistory(2))
    (w, x, _), (cut, *_) = sample(mesh, ("data", "model"))
    provider, found = xla.QtProvider(rule), []
    for fn, given in ((alone, w), (functools.partial(constrained, mesh), cut)):
        with contextlib.nullcontext() if fn is alone else jax.set_mesh(mesh):
            statistics = provider.init_statistics(fn, given, x)
            run = jax.jit(provider.apply(fn, statistics))
            run(given, x)
            found.append(run(given.at[3, 5].set(jnp.inf), x))
    for y in found:
        np.testing.assert_array_equal(np.isnan(y), np.arange(N)[None] == np.full((ROWS, 1), 5))


def test_layers_that_are_written_out_are_not_mixed_up(mesh):
    """What was done at one layer is done again at the next: with the next one's weight."""
    columns = NamedSharding(mesh, P(None, "model"))

    def layers(ws, x, place):
        for w in ws:
            x = jnp.tanh(x @ place(w))
        return x

    ws, (x,) = draw((N, N), (N, N), (N, N)), draw((ROWS, N), seed=1)
    gathered = functools.partial(layers, place=lambda w: lax.with_sharding_constraint(w, columns))
    plain = functools.partial(layers, place=lambda w: w)
    provider = xla.QtProvider(xla.QtRule(**RULES["int8"]))

    def loss(fn, ws, x):
        return jnp.sum(provider.apply(fn)(ws, x) ** 2)

    ours, theirs = (
        jax.jit(jax.grad(functools.partial(loss, fn)))(ws, x) for fn in (gathered, plain)
    )
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_delayed_scaling_gathers_float8(mesh):
    rule = xla.QtRule(**RULES["fp8"], weight_static_scale=True, static_average=qn.AmaxHistory(2))
    whole, cut = sample(mesh, ("data", "model"))
    provider, found = xla.QtProvider(rule), []
    for fn, args in ((alone, whole), (functools.partial(constrained, mesh), cut)):
        with contextlib.nullcontext() if fn is alone else jax.set_mesh(mesh):
            statistics = provider.init_statistics(fn, *args[:2])
            run = jax.jit(step(provider.apply(fn, statistics)))
            moved = collectives(run.lower(*args).compile())
            run(*args)
            found.append((run(*args), [one.calibration().upper for one in statistics.values()]))
    assert moved.get(("all-gather", "f32"), 0) < 4 * K * N // 8 + 4 * K * ROWS, moved
    for ours, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5 * np.abs(theirs).max())


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ({"weight_qtype": "int8"}, "the float weight is what its gradient is computed from"),
        ({**RULES["int8"], "bwd_original_residuals": True}, "so it is here"),
        ({**QAT, "weight_calibration_method": "absmax,0.9"}, "gradients are cut off by the range"),
    ],
)
def test_floats_are_gathered_where_they_are_needed(rule, why, mesh):
    whole, cut = sample(mesh, ("data", "model"))
    provider = xla.QtProvider(xla.QtRule(**rule))
    wanted = jax.jit(step(provider.apply(alone)))(*whole)
    run = jax.jit(step(provider.apply(functools.partial(constrained, mesh))))
    assert collectives(run.lower(*cut).compile())["all-gather", "f32"] >= K * N, why
    for ours, theirs in zip(run(*cut), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5 * np.abs(theirs).max())


def test_float_gradients_at_quantized_values():
    """``bwd_original_residuals=False`` without ``bwd_qtype``, in float64 NumPy."""
    (w,), (x,), (g,) = draw((K, N)), draw((ROWS, K), seed=1), draw((ROWS, N), seed=2)
    provider = xla.QtProvider(xla.QtRule(**QAT, act_qtype="int8"))
    found = jax.jit(step(provider.apply(alone)))(w, x, g)

    def rounded(array, axis):
        array = np.asarray(array, np.float64)
        scale = np.abs(array).max(axis, keepdims=True) / 127
        return np.rint(array / scale) * scale

    w, x, g = rounded(w, 0), rounded(x, 1), np.asarray(g, np.float64)
    for ours, theirs in zip(found, (x @ w, x.T @ g, g @ w.T), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_mapped_float_gradients_at_quantized_values():
    """Under vmap, with one weight for all examples."""
    (w,), (x,), (g,) = draw((K, N)), draw((3, ROWS, K), seed=1), draw((3, ROWS, N), seed=2)
    run = xla.QtProvider(xla.QtRule(**QAT, act_qtype="int8")).apply(alone)
    mapped = jax.jit(step(jax.vmap(run, (None, 0))))(w, x, g)
    each = [jax.jit(step(run))(w, *one) for one in zip(x, g, strict=True)]
    y, dw, dx = (np.stack(one) for one in zip(*each, strict=True))
    for ours, theirs in zip(mapped, (y, dw.sum(0), dx), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
