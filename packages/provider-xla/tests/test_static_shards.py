"""Static ranges in shard_map: those of the whole arrays, whatever devices have of them."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import provider_xla as xla
from interception_core import JaxtapError
from jaxtap_testkit.meshes import line
from jaxtap_testkit.xla_samples import draw
from provider_xla.measure.probe import probe

RULE = xla.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)


def layers(w, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def rows_of(w, x):
    """Two layers, the second cut along what it contracts, and summed over devices."""
    return lax.psum(jnp.tanh(x @ w[0]) @ w[1], "d")


# By how devices share the work: the program of one device, its specs, and the same without devices.
WAYS = {
    "examples": (layers, (P(), P("d")), P("d"), layers),
    "columns then rows": (
        lambda w, x: rows_of((w[0][0], w[1][0]), x),
        ((P(None, None, "d"), P(None, "d")), P()),
        P(),
        lambda w, x: jnp.tanh(x @ w[0][0]) @ w[1][0],
    ),
}


def sample(way, size):
    body, in_specs, out_specs, whole = WAYS[way]
    (w,), (x,) = draw((2, 8, 8)), draw((8, 8), seed=1)
    x = x * np.linspace(0.7, 1.3, 8, dtype=np.float32)[:, None]
    w = w if way == "examples" else (w[:1], w[1:])
    split = jax.shard_map(body, mesh=line(size=size), in_specs=in_specs, out_specs=out_specs)
    return whole, split, w, x


def measured(fn, w, batches):
    plan = xla.PtqProvider(RULE).plan(fn, w, batches[0])
    return plan, plan.calibrate(w, [(x,) for x in batches])


def largest(ranges):
    return [np.ravel(one.upper) for one in ranges.values()]


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("way", WAYS)
def test_calibrate(way, size):
    whole, split, w, x = sample(way, size)
    batches = [x, 2 * x]
    _, expected = measured(whole, w, batches)
    plan, found = measured(split, w, batches)
    # What a device has of a hidden activation is rounded in another order.
    np.testing.assert_allclose(largest(found), largest(expected), rtol=1e-6)
    y = jax.jit(plan.apply(split, found))(plan.quantize(w), x)
    exact = whole(w, x)
    assert np.linalg.norm(y - exact) < 0.05 * np.linalg.norm(exact)


@pytest.mark.parametrize("way", WAYS)
def test_statistics_around(way):
    """They are updated, and so are gradients by the parameters."""
    whole, split, w, x = sample(way, 4)
    results = []
    for fn, mesh in ((whole, None), (split, line(size=4))):
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            provider = xla.QtProvider(RULE)
            statistics = provider.init_statistics(fn, w, x)
            apply = provider.apply(fn, statistics)
            step = jax.jit(jax.grad(lambda w, x, apply=apply: (apply(w, x) ** 2).sum()))
            step(w, x)
            slope = list(map(np.asarray, jax.tree.leaves(step(w, 2 * x))))
            ranges = {key: one.calibration() for key, one in statistics.items()}
            results.append((slope, largest(ranges)))
    (wanted, expected), (slope, found) = results
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for one, other in zip(slope, wanted, strict=True):
        # Weights have a scale for each device's part.
        assert np.linalg.norm(one - other) < 0.05 * np.linalg.norm(other)


def test_a_function_in_shard_map_takes_statistics_as_an_argument():
    (w,), (x,) = draw((8, 8)), draw((8, 8), seed=1)
    provider, mesh = xla.QtProvider(RULE), line(size=4)
    fn = lambda w, x: x @ w  # noqa: E731
    with jax.set_mesh(mesh):
        statistics = provider.init_statistics(fn, w, x[:2])
        for update in (True, False):
            closed = jax.shard_map(
                lambda w, x, update=update: provider.apply(fn, statistics, update=update)(w, x),
                in_specs=(P(), P("d")),
                out_specs=P("d"),
            )
            with pytest.raises(xla.QuantizationError, match="must be an argument of the function"):
                jax.jit(closed)(w, x)
        given = jax.shard_map(
            lambda w, x, statistics: provider.apply(fn, statistics)(w, x),
            in_specs=(P(), P("d"), P()),
            out_specs=P("d"),
        )
        jax.jit(given)(w, x, statistics)
    (one,) = statistics.values()
    np.testing.assert_allclose(one.calibration().upper, np.abs(x).max(1).mean(), rtol=1e-6)


def test_ranges_are_an_argument_of_a_function_in_shard_map():
    (w,), (x,) = draw((8, 8)), draw((8, 8), seed=1)
    plan, ranges = measured(layers, w[None], [x])
    stored = plan.quantize(w[None])
    given = jax.shard_map(
        lambda w, x, ranges: plan.apply(layers, ranges)(w, x),
        mesh=line(size=4),
        in_specs=(P(), P("d"), P()),
        out_specs=P("d"),
    )
    (range_,) = largest(ranges)
    scale, scales = range_.astype(np.float64) / 127, np.abs(np.asarray(w, np.float64)).max(0) / 127
    exact = np.clip(np.round(x / scale), -127, 127) * scale @ (np.round(w / scales) * scales)
    np.testing.assert_allclose(jax.jit(given)(stored, x, ranges), np.tanh(exact), atol=1e-5)

    # Where no batch was seen, each device has the range of its own activation.
    unseen = jax.tree.map(jnp.zeros_like, ranges)
    parts = np.asarray(x, np.float64).reshape(4, 2, 8)
    scale = np.abs(parts).max((1, 2), keepdims=True) / 127
    exact = (np.round(parts / scale) * scale).reshape(8, 8) @ (np.round(w / scales) * scales)
    np.testing.assert_allclose(jax.jit(given)(stored, x, unseen), np.tanh(exact), atol=1e-5)


def test_statistics_on_another_device():
    _, split, w, x = sample("examples", 4)
    provider = xla.QtProvider(RULE)
    statistics = provider.init_statistics(split, w, x)
    with pytest.raises(JaxtapError, match=r"on all of them, got one on 1\. Make it \(statistics"):
        jax.jit(provider.apply(split, statistics))(w, x)


def test_what_can_not_be_measured_says_why():
    _, split, w, x = sample("examples", 4)

    def inner(w, x):
        return jax.grad(lambda w: (split(w, x) ** 2).sum())(w)

    with pytest.warns(xla.QuantizationWarning, match="put jax.jit around the shard_map"):
        plan = xla.PtqProvider(RULE).plan(inner, w, x)
    with pytest.raises(xla.QuantizationError, match=r"matmul:0\. Put jax\.jit around the function"):
        plan.calibrate(w, [(x,)])
    plan = xla.PtqProvider(RULE).plan(split, w, x)
    with pytest.raises(xla.QuantizationError, match=r"matmul:0 can't be measured inside of shard"):
        probe(plan, w, [(x,)], lambda site: jnp.sum(site.operands[0]))
