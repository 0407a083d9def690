"""Loops at export: each step has what was decided for the loop, whatever it looks like there."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.tree_util import tree_leaves_with_path

import provider_odml as odml
from jaxtap_testkit.odml_exports import DYNAMIC, W8A8, W8A16, WEIGHTS, normal
from provider_odml.features import SiteUse
from provider_odml_export.exporting import export as exporting
from provider_odml_export.exporting.written_out import planned

P = {"x": normal(6, 4) / 2, "h": normal(4, 4, seed=1) / 2, "b": normal(4, seed=2)}
P |= {"stack": normal(3, 4, 4, seed=3) / 2}
X = normal(2, 2, 6, seed=4)


def cell(p, h, x):
    return jnp.tanh(x @ p["x"] + h @ p["h"] + p["b"])


def steps_of(p, x, reverse=False, **options):
    """Scan over the rows of an input: the last state, and all."""

    def step(h, x):
        h = cell(p, h, x)
        return h, h

    return lax.scan(step, jnp.zeros((2, 4)), x.swapaxes(0, 1), reverse=reverse, **options)


def partial_body(p, x):
    step = functools.partial(lambda p, h, x: (cell(p, h, x), None), p)
    return lax.scan(step, jnp.zeros((2, 4)), x.swapaxes(0, 1), unroll=2)[0]


def carried_along(p, x):
    """JAX makes a constant of what a loop carries without a change."""

    def step(carry, x):
        h, w, first = carry
        return (jnp.tanh(x @ p["x"] + h @ w + first), w, first), None

    carry = jnp.zeros((2, 4)), p["h"], x[:, 0] @ p["x"]
    return lax.scan(step, carry, x.swapaxes(0, 1))[0]


def by_index(p, x):
    """The index is added to, multiplied with, and picks rows of an input and of a parameter."""

    def body(i, h):
        y = lax.dynamic_index_in_dim(x, i, 1, keepdims=False) @ p["x"]
        return jnp.tanh(h @ p["stack"][i] + y * (i + 1) / 2)

    return lax.fori_loop(0, 2, body, jnp.zeros((2, 4)))


def loop_in_loop(p, x):
    """One function at two depths."""

    def layer(h, w):
        return jnp.tanh(h @ w), None

    def step(h, x):
        return lax.scan(layer, h + x @ p["x"], p["stack"])[0], None

    h = lax.scan(step, jnp.zeros((2, 4)), x.swapaxes(0, 1))[0]
    return lax.scan(layer, h, p["stack"][:2])[0]


def in_scopes(p, x):
    def step(h, x):
        with jax.named_scope("cell"):
            return cell(p, h, x), None

    with jax.named_scope("layer"):
        h = lax.scan(jax.checkpoint(step), jnp.zeros((2, 4)), x.swapaxes(0, 1))[0]
    return jax.jit(lambda h: h @ p["h"])(h)


def with_branches(p, x):
    def step(h, ix):
        i, x = ix
        h = lax.cond(i % 2 == 0, lambda: cell(p, h, x), lambda: jnp.tanh(h @ p["h"]))
        return jnp.tanh(h + x @ p["x"]), i

    return lax.scan(step, jnp.zeros((2, 4)), (jnp.arange(x.shape[1]), x.swapaxes(0, 1)))


def while_in_loop(p, x):
    def step(h, x):
        body = lambda s: (s[0] + 1, jnp.tanh(s[1] @ p["h"]))  # noqa: E731
        return lax.while_loop(lambda s: s[0] < 2, body, (0, cell(p, h, x)))[1], None

    return lax.scan(step, jnp.zeros((2, 4)), x.swapaxes(0, 1))[0]


PROGRAMS = {
    "last": lambda p, x: steps_of(p, x)[0] @ p["h"],
    "all": lambda p, x: steps_of(p, x)[1] @ p["h"],
    "backwards": lambda p, x: steps_of(p, x, reverse=True),
    "both ways": lambda p, x: steps_of(p, x)[0] + steps_of(p, x, reverse=True)[0],
    "stacked": lambda p, x: lax.scan(lambda h, x: (jnp.tanh(h @ p["h"] + x), h), jnp.zeros((2, 4)),
                                     steps_of(p, x)[1])[1],
    "a number as the first state": lambda p, x: steps_of(p, x)[0] + lax.scan(
        lambda h, x: (h + x[0, 0], None), 0.0, x.swapaxes(0, 1))[0],
    "of examples": lambda p, x: jax.vmap(lambda x: lax.scan(
        lambda h, x: (cell(p, h, x), None), jnp.zeros(4), x)[0])(x),
    "map": lambda p, x: lax.map(lambda x: jnp.tanh(x @ p["x"]) + 1, x.swapaxes(0, 1)).sum(0),
    "partial": partial_body, "carried along": carried_along, "by index": by_index,
    "loop in loop": loop_in_loop, "in scopes": in_scopes, "branches": with_branches,
    "while": while_in_loop,
}  # fmt: skip


def flax_both_ways():
    net = nn.Bidirectional(nn.RNN(nn.OptimizedLSTMCell(4), unroll=2), nn.RNN(nn.GRUCell(4)))
    variables = jax.jit(net.init)(jax.random.key(0), X)
    return lambda v, x: net.apply(v, x).mean(1), variables


def equinox_gru():
    gru, static = eqx.partition(eqx.nn.GRUCell(6, 4, key=jax.random.key(0)), eqx.is_array)

    def fn(params, x):
        model = eqx.combine(params, static)
        one = lambda x: lax.scan(lambda h, x: (model(x, h), None), jnp.zeros(4), x)[0]  # noqa: E731
        return jax.vmap(one)(x)

    return fn, gru


NETWORKS = {"flax": flax_both_ways, "equinox": equinox_gru}


@functools.cache
def together(*names):
    """Return programs and networks as one program, and its parameters."""
    cases = {}
    for i, name in enumerate(names):
        # The converter computes equal products once, also for readers of different scales.
        own = jax.tree.map(lambda x, i=i: x * (1 + i / 50), P)
        cases[name] = NETWORKS[name]() if name in NETWORKS else (PROGRAMS[name], own)

    def fn(params, x):
        return [case[0](params[name], x) for name, case in cases.items()]

    return fn, {name: case[1] for name, case in cases.items()}


def check_ranges(planned, one, stats):
    """The ranges of calibration, which keeps loops, are those of the written-out steps' values."""
    origins, seen, places = planned.program.origins, {}, set()
    for op_id, decision in one.plan.decisions.items():
        uses = {f"{op_id}#{slot}": use for slot, use in decision.inputs.items()}
        for place, use in (uses | {op_id: decision.output}).items():
            if not isinstance(use, SiteUse) or one.plan.sites[use.site].fixed is not None:
                continue
            key, step = origins[use.site]
            places.add(key)
            # Of a branch one alone is seen in the loop, of what stays a loop the first step here.
            if use.observe and not decision.node.is_chosen and not decision.node.loops:
                row = key, step[: len(stats.steps(key))]
                seen.setdefault(row, []).append(one.in_float[place])
    assert places == set(stats)
    assert seen
    for (key, step), values in seen.items():
        found = stats[key].at(step).calibration()
        extremes = min(0, *(v.min() for v in values)), max(0, *(v.max() for v in values))
        np.testing.assert_allclose((found.lower, found.upper), extremes, rtol=1e-5, atol=1e-6)
    for key in stats:
        rows = {step for other, step in seen if other == key}
        assert not rows or len(rows) == stats[key].row[..., 0].size


def check(fn, params, rule=W8A8, tolerance=0.1):
    """Export, which compares each step with JAX, and compare the results with the float program."""
    stats = odml.qat(fn, rule).calibrate(params, [(X,)]) if rule.is_static else None
    original = exporting._exported

    def exported(name, signature, planned, stats):
        one = original(name, signature, planned, stats)
        if rule is W8A8:
            check_ranges(planned, one, stats)
        return one

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "_exported", exported)
        artifact = odml.export(fn, params, stats, rule, X)
    device = artifact.run(x=X)
    for i, (path, expected) in enumerate(tree_leaves_with_path(fn(params, X))):
        difference = np.float64(device[f"output_{i}"]) - np.float64(expected)
        assert np.linalg.norm(difference) <= tolerance * np.linalg.norm(expected), path
    return artifact


def test_a_recurrent_network_is_exported():
    """It reads a part of its input besides, at another scale than the steps do."""

    def fn(p, x):
        h, ys = steps_of(p, x)
        return ys @ p["h"], h + jnp.tanh(x[:, 0] @ p["x"])

    report = check(fn, P).report
    places = {one.place for one in report.sites}
    assert {"scan(step)[0]/dot_general:0#0", "scan(step)[1]/dot_general:0#0"} <= places
    assert report.warnings == ()


def test_loops_of_one_name_and_of_other_lengths():
    """Step 2 of the longer ones was taken for a step of the loop before it."""

    def many(weights, x):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0]

    def nested(p, x):
        return lax.scan(lambda h, w: (many(p["three"], many(p["two"], h)), None), x, p["two"])[0]

    def chosen(p, x):
        branches = [lambda h: many(p["two"], h), lambda h: many(p["three"], h)]
        return lax.cond(x[0, 0] > 0, *branches, x) + lax.switch(1, branches[::-1], x)

    def fn(p, x):
        return many(p["two"], x), many(p["three"], 9 * x), nested(p, x), chosen(p, x)

    params, x = {"two": normal(2, 4, 4), "three": normal(3, 4, 4)}, normal(2, 4)
    found = planned(odml.qat(fn, W8A8), (params, x), {})
    steps = {}
    for rolled, step in found.origins.values():
        steps.setdefault(rolled, set()).add(step)
    lengths = {key: site.steps for key, site in found.trained.sites.items()}
    for key, seen in steps.items():
        assert seen == {*np.ndindex(*lengths[key])}, key
    assert sorted(map(len, steps.values()))[-3:] == [6, 6, 6]


REPEATED = "last", "all", "both ways", "of examples"  # as in "backwards", "flax" and "equinox"
EACH = tuple(name for name in (*PROGRAMS, *NETWORKS) if name not in (*REPEATED, "while"))
SOME = "backwards", "by index", "loop in loop"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "names"),
    [(W8A8, EACH), (W8A16, SOME), (DYNAMIC, SOME), (WEIGHTS, SOME)],
    ids=["W8A8", "W8A16", "dynamic", "weight-only"],
)
def test_recurrent_networks_are_exported(rule, names):
    fn, params = together(*names)
    check(fn, params, rule, tolerance=0.05 if rule is W8A16 else 0.15)


@pytest.mark.slow
def test_a_while_loop_with_products_beside_it_is_refused():
    """The converter shares what stands for a missing bias between a loop and what is around it."""
    with pytest.raises(odml.ConversionError, match=r"'tfl.while' op operand .* but got 'none'"):
        check(PROGRAMS["while"], P)


@pytest.mark.slow
def test_the_program_for_other_converters_has_the_parameters_of_each_step(engine):
    """Not those of one step in all of them."""

    def fn(p, x):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x[:, 0] @ p["x"], p["stack"])[0]

    stats = odml.qat(fn, W8A8, engine=engine).calibrate(P, [(X,)])
    provider = odml.OdmlConversionProvider(W8A8, P, stats, engine=engine)
    found, expected = provider.apply(fn)(P, X), fn(P, X)
    assert np.linalg.norm(found - expected) < 0.1 * np.linalg.norm(expected)


@pytest.mark.slow
def test_rules_by_path_hold_in_the_steps():
    rules = [
        odml.OdmlRule(module_path="layer/cell"),
        odml.OdmlRule(weight_qtype="int8", output_qtype="int8"),
    ]
    fn = PROGRAMS["in scopes"]
    stats = odml.qat(fn, rules).calibrate(P, [(X,)])
    report = odml.export(fn, P, stats, rules, X).report
    assert len(report.sites) == 2  # of the last product


def test_a_function_that_does_something_else_when_it_is_exported_is_refused():
    calls = []

    def fn(p, x):
        calls.append(x)
        return steps_of(p, x)[0] @ p["h"] if len(calls) == 1 else x[:, 0] @ p["x"]

    with pytest.raises(odml.OdmlError, match=r"must find every operation of the plan.*scan\(step"):
        planned(odml.qat(fn, W8A8), (P, X), {})
