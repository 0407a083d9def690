"""Rules with weight_path: about the operations of some parameters, wherever these are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quant_numerics as qn
from interception_core import get_engine
from provider_xla import (
    PtqProvider,
    QtProvider,
    QuantizationError,
    QuantizationRule,
    QuantizationWarning,
)
from provider_xla.program.matching import Rules
from provider_xla.program.sites import Sites
from provider_xla.run.contraction import run_site

W8 = QuantizationRule(weight_qtype="int8")


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def rule(path, qtype="int4", **fields):
    return QuantizationRule(weight_path=path, weight_qtype=qtype, **fields)


def qtypes(plan):
    return {path.removeprefix("args[0]"): weight.qtype for path, weight in plan.weights.items()}


def layers(params, x):
    for w in params["layers"]:
        x = jnp.tanh(x @ w)
    return x @ params["head"]


LAYERS = {"layers": [draw(i, 8, 8) for i in range(3)], "head": draw(9, 8, 4)}


def test_weights_of_one_module_path_are_told_apart():
    rules = [rule(r"\['layers'\]\[1\]"), rule(r"\['head'\]", "int6"), W8]
    plan = PtqProvider(rules, strict=True).plan(layers, LAYERS, draw(7, 2, 8))
    assert qtypes(plan) == {
        "['layers'][0]": "int8",
        "['layers'][1]": "int4",
        "['layers'][2]": "int8",
        "['head']": "int6",
    }
    x = draw(7, 2, 8)
    found = jax.jit(plan.apply(layers))(plan.quantize(LAYERS), x)
    bits = {"['head']": 6, "['layers'][1]": 4}
    grid = jax.tree_util.tree_map_with_path(
        lambda path, w: on_grid(w, bits.get(jax.tree_util.keystr(path), 8)), LAYERS
    )
    h = np.asarray(x, np.float64)
    for w in grid["layers"]:
        h = np.tanh(h @ w)
    np.testing.assert_allclose(found, h @ grid["head"], rtol=1e-4, atol=1e-5)


def on_grid(w, bits):
    w = np.asarray(w, np.float64)
    scale = np.abs(w).max(0, keepdims=True) / (2 ** (bits - 1) - 1)
    return np.round(w / scale) * scale


def test_the_whole_path_must_match():
    with pytest.warns(QuantizationWarning, match="rule 0 has no effect"):
        plan = PtqProvider([rule(r"\['layers'\]"), W8]).plan(layers, LAYERS, draw(7, 2, 8))
    assert set(qtypes(plan).values()) == {"int8"}


def test_parameters_that_are_one_array_have_an_empty_path():
    plan = PtqProvider([rule("")], strict=True).plan(jnp.dot, draw(0, 8, 4), draw(1, 4, 8))
    assert qtypes(plan) == {"": "int4"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["take", "index"])
def test_lookups(kind):
    params = {"words": draw(0, 16, 8), "places": draw(1, 16, 8)}

    def fn(params, ids):
        if kind == "index":
            return params["words"][ids] + params["places"][ids]
        return jnp.take(params["words"], ids, axis=0) + jnp.take(params["places"], ids, axis=0)

    named = {"op_names": ["take"]}
    rules = [rule(r"\['words'\]", "int4", **named), rule(r"\['pl.*'\]", "int6", **named)]
    ids = jnp.array([3, 1])
    plan = PtqProvider(rules, strict=True).plan(fn, params, ids)
    assert qtypes(plan) == {"['words']": "int4", "['places']": "int6"}
    stored = plan.quantize(params)
    rows = sum(
        np.asarray(qn.dequantize(qn.unpack(q) if isinstance(q, qn.PackedQArray) else q))[ids]
        for q in stored.values()
    )
    np.testing.assert_allclose(jax.jit(plan.apply(fn))(stored, ids), rows, rtol=1e-6)


def block(x, w):
    return jnp.tanh(x @ w)


def count_traces(rules, params, x):
    """Runs jitted blocks with a parameter each; returns their results and how many were traced."""
    jitted, seen = jax.jit(block), set()

    def fn(params, x):
        return [jitted(x, w) for w in params]

    def record(op, problem):
        seen.add(op.op_id)

    sites = Sites(get_engine("trace"), Rules(tuple(rules), "args[0]"), run_site, record)
    return jax.jit(sites.tap(fn))(params, x), len(seen)


def test_equal_blocks_with_other_rules_do_not_share_a_result():
    w, x = draw(0, 8, 8), draw(1, 4, 8)
    rules = [rule(r"\[1\]", "int4"), W8]
    found, traces = count_traces(rules, [w] * 4, x)
    assert traces == 2
    expected = [np.tanh(np.asarray(x, np.float64) @ on_grid(w, 4 if i == 1 else 8)) for i in (0, 1)]
    for i, value in enumerate(found):
        np.testing.assert_allclose(value, expected[i == 1], rtol=1e-4, atol=1e-5)
    assert np.abs(expected[0] - expected[1]).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "traces"),
    [
        ([W8], 1),
        ([rule(r"\[[02]\]", "int4"), W8], 2),
        # Two rules that say the same of their parameters.
        ([rule(r"\[0\]", "int4"), rule(r"\[2\]", "int4"), W8], 2),
        ([rule(r"\[0\]", "int8"), W8], 1),
        ([rule(r"\[0\]", "int4"), rule(r"\[2\]", "int6"), W8], 3),
        ([rule(r"\['elsewhere'\]", "int4"), W8], 1),
    ],
)
def test_blocks_share_a_trace_where_no_rule_tells_their_parameters_apart(rules, traces):
    assert count_traces(rules, [draw(0, 8, 8)] * 4, draw(1, 4, 8))[1] == traces


@given(
    patterns=st.lists(st.sampled_from(["a", "b", "[ab]", ".*", "c", None]), max_size=4),
    fields=st.lists(st.sampled_from(["int4", "int8", None]), min_size=4, max_size=4),
    paths=st.tuples(*[st.sampled_from(["a", "b", "c", "d"])] * 2),
)
def test_keys_are_equal_exactly_where_all_rules_treat_parameters_alike(patterns, fields, paths):
    given = [
        QuantizationRule(weight_path=pattern, weight_qtype=qtype, module_path=f"m{i % 2}|top")
        for i, (pattern, qtype) in enumerate(zip(patterns, fields, strict=False))
    ]
    rules = Rules(tuple(given), "args[0]")
    one, other = (rules.origin_key(f"args[0]{path}") for path in paths)

    def decided(path, module):
        found = rules.find(("dot",), module, (path,))
        return None if found is None else given[found].weight_qtype

    decisions = [[decided(path, m) for m in ("m0", "m1", "top", "no")] for path in paths]
    if one == other:
        assert decisions[0] == decisions[1]
    if decisions[0] != decisions[1]:
        assert one != other
    assert rules.origin_key("args[1]a") not in (one, other)


@pytest.mark.slow
def test_in_scans_and_under_grad():
    params = {"up": draw(0, 3, 8, 8), "down": draw(1, 3, 8, 8)}

    def fn(params, x):
        def layer(x, p):
            return jnp.tanh(x @ p["up"]) @ p["down"].T, None

        return jax.lax.scan(layer, x, params)[0]

    rules = [rule(r"\['up'\]", "int3"), W8]
    plan = PtqProvider(rules, strict=True).plan(fn, params, draw(2, 4, 8))
    assert qtypes(plan) == {"['up']": "int3", "['down']": "int8"}
    trained = QtProvider(rules)
    loss, x = trained.apply(lambda params, x: fn(params, x).sum()), draw(2, 4, 8)
    gradients = jax.jit(jax.grad(loss))(params, x)
    assert jax.tree.all(jax.tree.map(lambda g: bool(jnp.isfinite(g).all()), gradients))
    by_rule = {record.paths: record.qtypes for record in trained.plan(fn, params, x).ops}
    assert by_rule["args[0]['up']",] == (None, "int3")
    assert by_rule["args[0]['down']",] == (None, "int8")


def test_activations_of_the_operation_have_the_qtype_of_its_rule():
    rules = [rule(r"\['head'\]", "int8", act_qtype="int8")]
    plan = PtqProvider(rules, strict=True).plan(layers, LAYERS, draw(7, 2, 8))
    assert [(op.paths, op.qtypes) for op in plan.ops if op.quantized] == [
        (("args[0]['head']",), ("int8", "int8"))
    ]


def test_an_einsum_of_several_operands_is_looked_at_in_its_parts():
    params = {"a": draw(0, 8, 6), "b": draw(1, 6, 7)}

    def fn(params, x):
        return jnp.einsum("bi,ij,jk->bk", x, params["a"], params["b"])

    plan = PtqProvider([rule(r"\['b'\]")], strict=True).plan(fn, params, draw(2, 4, 8))
    assert qtypes(plan) == {"['b']": "int4"}


def test_a_derived_weight_has_the_paths_of_its_parameters():
    def fn(p, x):
        return x @ (p["w"] * p["g"])

    params, x = {"w": draw(0, 8, 4), "g": draw(1, 8, 1)}, draw(2, 2, 8)
    for path in params:
        plan = PtqProvider([rule(rf"\['{path}'\]")], strict=True).plan(fn, params, x)
        assert [weight.qtype for weight in plan.weights.values()] == ["int4"]
    with pytest.raises(QuantizationError, match="rule 0 has no effect"):
        PtqProvider([rule(r"\['other'\]")], strict=True).plan(fn, params, x)


def test_the_patch_engine_knows_parameters_as_they_are():
    rules = [rule(r"\['head'\]", "int4"), W8]
    plan = PtqProvider(rules, engine="patch", strict=True).plan(layers, LAYERS, draw(7, 2, 8))
    assert qtypes(plan)["['head']"] == "int4"
    assert qtypes(plan)["['layers'][0]"] == "int8"


@pytest.mark.parametrize("pattern", ["(", 3])
def test_what_is_no_pattern(pattern):
    with pytest.raises(ValueError, match="weight_path must be None or a regular expression"):
        QuantizationRule(weight_path=pattern)


def test_fused_functions_have_no_parameter():
    with pytest.raises(ValueError, match="kernel must be None where weight_path is given"):
        QuantizationRule(weight_path=".*", kernel="fused")
