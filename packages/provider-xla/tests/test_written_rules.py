"""Rules as they read, presets, and what plans explain."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
from provider_xla import Gradient, Q, QtRule, QuantizationRule, Rule, Static
from provider_xla.rules.written import PRESETS, as_rules, installed

SAME = {
    "nothing": (Rule("head"), QuantizationRule(module_path="head")),
    "a qtype": (Rule(weight="int8"), QuantizationRule(weight_qtype="int8")),
    "a dtype": (Rule(weight=jnp.int4), QuantizationRule(weight_qtype="int4")),
    "tiles": (
        Rule("mlp/.*", weight=Q("int4", tile=32, scales="float16"), act="int8"),
        QuantizationRule(
            module_path="mlp/.*",
            weight_qtype="int4",
            tile_size=32,
            scale_dtype="float16",
            act_qtype="int8",
        ),
    ),
    "a static range": (
        Rule(weight="int8", act=Static("int8", "minmax", steps="joined", unseen="error")),
        QuantizationRule(
            weight_qtype="int8",
            act_qtype="int8",
            act_static_scale=True,
            act_calibration_method="minmax",
            static_range="joined",
            unseen_range="error",
        ),
    ),
    "another calibration": (
        Rule(weight=Q("int8", calibration="mse"), act=Q("int8", calibration="rms,7")),
        QuantizationRule(
            weight_qtype="int8",
            weight_calibration_method="mse",
            act_qtype="int8",
            act_calibration_method="rms,7",
        ),
    ),
    "operations": (
        Rule(ops=["take"], param=r"\['table'\]", weight="int8"),
        QuantizationRule(op_names=["take"], weight_path=r"\['table'\]", weight_qtype="int8"),
    ),
    "activations, too": (
        Rule(weight="int8", act="int8", activations=True),
        QuantizationRule(weight_qtype="int8", act_qtype="int8", weights_only=False),
    ),
    "sparse": (
        Rule(weight="int8", sparsity="2:4"),
        QuantizationRule(weight_qtype="int8", sparsity="2:4"),
    ),
    "fused": (Rule(fused=True), QuantizationRule(kernel="fused")),
    "a gradient": (
        Rule(weight="int8", act="int8", gradient=Gradient("int8", rounding="uniform")),
        QtRule(
            weight_qtype="int8",
            act_qtype="int8",
            bwd_qtype="int8",
            bwd_stochastic_rounding="uniform",
        ),
    ),
    "the words of Qwix": (
        Rule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8, tile_size=32),
        QuantizationRule(weight_qtype="int8", act_qtype="int8", tile_size=32, weights_only=False),
    ),
    "one operation": (
        Rule(ops="take", weight="int8"),
        QuantizationRule(op_names=["take"], weight_qtype="int8"),
    ),
    "operations in the words of Qwix": (
        Rule(op_names=("dot_general",), weight_qtype="int8"),
        QuantizationRule(op_names=("dot", "dot_general", "matmul"), weight_qtype="int8"),
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_a_written_rule_is_a_rule(case):
    written, rule = SAME[case]
    assert written == rule
    assert type(written) is type(rule)


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"weight": "int8", "weight_qtype": "int8"}, TypeError, "got weight_qtype beside them"),
        ({"weights": "int8"}, TypeError, "Rule takes path, weight.* got weights"),
        ({"weight": "int4x"}, ValueError, "weight_qtype must be None or a qtype"),
        ({"weight": "INT8"}, ValueError, "got 'INT8'. Did you mean 'int8'"),
        ({"act": Static("Int8")}, ValueError, "got 'Int8'. Did you mean 'int8'"),
        ({"weight": "int8", "act": Q("int8", tile=4)}, TypeError, "act must be in tiles of its"),
        ({"act": Static("int8", steps="all")}, ValueError, "static_range must be"),
        ({"lora": 0}, ValueError, "rank must be"),
        ({"weight": "int8", "act": "int8", "gradient": "int9"}, ValueError, "bwd_qtype must be"),
        ({"path": "("}, ValueError, "module_path must be a regular expression"),
    ],
)
def test_a_wrong_argument_is_named(fields, error, match):
    with pytest.raises(error, match=match):
        Rule(**fields)


def mlp(params, x):
    return jax.nn.relu(x @ params["up"]) @ params["down"]


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    params = {"up": rng.normal(size=(64, 128)) / 8, "down": rng.normal(size=(128, 32)) / 11}
    params = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    return params, jnp.asarray(rng.normal(size=(16, 64)), jnp.float32)


MOST = {4: 0.25, 8: 0.08}


@pytest.mark.parametrize("name", installed())
def test_a_preset_runs(name):
    params, x = inputs()
    rule = PRESETS[name].rule
    expected = np.asarray(mlp(params, x), np.float64)
    if isinstance(rule, QtRule):
        applied = xla.QtProvider(name).apply(mlp)
        gradient = jax.jit(jax.grad(lambda params: (applied(params, x) ** 2).sum()))(params)
        exact = jax.grad(lambda params: (mlp(params, x) ** 2).sum())(params)
        for found, wanted in zip(jax.tree.leaves(gradient), jax.tree.leaves(exact), strict=True):
            assert np.linalg.norm(found - wanted) < 0.5 * np.linalg.norm(wanted)
        found = jax.jit(applied)(params, x)
    else:
        plan = xla.PtqProvider(name).plan(mlp, params, x)
        assert plan.problems == ()
        assert set(plan.weights) == {"args[0]['up']", "args[0]['down']"}
        found = jax.jit(plan.apply())(plan.quantize(params), x)
    bits = 4 if "4" in rule.weight_qtype else 8
    assert np.linalg.norm(found - expected) < MOST[bits] * np.linalg.norm(expected)


def test_a_preset_in_other_tiles():
    assert as_rules("int4/64") == [dataclasses.replace(PRESETS["int4"].rule, tile_size=64)]
    assert as_rules(["int8", Rule("head")]) == [PRESETS["int8"].rule, Rule("head")]
    with pytest.raises(xla.QuantizationError, match=r"is for int4, w4a8.*, got 'int8/32'"):
        as_rules("int8/32")


@pytest.mark.parametrize(("name", "near"), [("INT8", "int8"), ("w8a9", "w8a8"), ("fp-8", "fp8")])
def test_a_misspelled_preset(name, near):
    with pytest.raises(xla.QuantizationError, match=f"got '{name}'. Did you mean '{near}'"):
        xla.PtqProvider(name)


def test_presets_show_what_they_do():
    found = {one.name: one for one in xla.presets()}
    assert list(found) == list(installed())
    assert found["int8"].bytes_per_weight == pytest.approx(1 + 4 / 1024)
    assert found["int4"].bytes_per_weight == pytest.approx(0.5 + 2 / 32)
    assert found["train-int8"].runs == "training"
    assert all(name in str(xla.presets()) for name in installed())


def test_explanations():
    params, x = inputs()

    def model(params, x):
        with jax.named_scope("mlp"):
            x = mlp(params, x)
        with jax.named_scope("head"):
            return x @ params["head"] + params["bias"]

    params |= {"head": jnp.ones((32, 8)), "bias": jnp.ones(8)}
    plan = xla.PtqProvider([Rule("head"), Rule("mlp", weight="int8")]).plan(model, params, x)
    up = plan.explain("args[0]['up']")
    assert up == plan.explain("up")
    for line in (
        "args[0]['up']: float32[64, 128]",
        "stored in int8 by rule 1, scales of shape [1, 128]",
        "used by mlp/matmul:0",
        "  rule 0 (module_path='head') does not match",
        "  rule 1 (module_path='mlp', weight_qtype='int8') decides",
    ):
        assert any(found.startswith(line) for found in up.splitlines()), line
    head = plan.explain("head/matmul:0").splitlines()
    assert head[0] == "head/matmul:0: matmul of f32[16,32] and f32[32,8]"
    assert "it stays float: the rule leaves it float" in head
    assert "a rule with a format for head, before rule 0 changes that" in head
    assert "it stays float: no matmul, convolution or gather uses it" in plan.explain("bias")
    with pytest.raises(xla.QuantizationError, match="2 have it: mlp/matmul:0, mlp/matmul:1"):
        plan.explain("mlp")
    with pytest.raises(xla.QuantizationError, match="got 'dwon', and the nearest are"):
        plan.explain("dwon")


@pytest.mark.parametrize("name", ["int8", "w4a8", "nf4"])
def test_dequantized_parameters(name):
    params, x = inputs()
    plan = xla.PtqProvider(name).plan(mlp, params, x)
    found = plan.dequantize(plan.quantize(params))
    assert jax.tree.structure(found) == jax.tree.structure(params)
    for one, exact in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        assert one.dtype == exact.dtype
        assert np.linalg.norm(one - exact) < 0.15 * np.linalg.norm(exact)


def test_a_function_is_planned_not_quantized_as_a_model():
    params, x = inputs()
    with pytest.raises(TypeError, match=r"mlp is a function\. Plan it"):
        xla.quantize_model(mlp, "int8", params, x)


def test_a_batch_that_is_not_a_tuple():
    params, x = inputs()
    static = xla.PtqProvider(Rule(weight="int8", act=Static("int8"))).plan(mlp, params, x)
    for batches in ([x], x, [{"x": x}]):
        with pytest.raises(xla.QuantizationError, match=r"hold tuples.*\[\(x,\)\], got "):
            static.calibrate(params, batches)


def test_parameters_that_are_stored_already():
    params, x = inputs()
    plan = xla.PtqProvider("int8").plan(mlp, params, x)
    with pytest.raises(xla.QuantizationError, match=r"Some are stored already.*plan.apply\(\)"):
        plan.quantize(plan.quantize(params))


def test_short_names_are_explained():
    w = jnp.ones((64, 32))
    params, x = {"a": w, "l": w, "m": jnp.ones((32, 32))}, jnp.ones((4, 64))

    def model(p, x):
        return x @ (p["a"] * p["l"]) @ p["m"]

    plan = xla.PtqProvider("int8").plan(model, params, x)
    assert plan.explain("a").startswith("args[0]['a']: float32[64, 32]")
    assert plan.explain("l").startswith("args[0]['l']: float32[64, 32]")
    assert "its weight is derived, mul(" in plan.explain("matmul:0")
    with pytest.raises(xla.QuantizationError, match="can't be undone"):
        plan.dequantize(plan.quantize(params))


def test_explanations_say_what_would_change_it():
    table, x = jnp.ones((16, 32)), jnp.ones((4, 32))

    def model(p, x):
        return jnp.take(p["t"], jnp.array([1, 2]), axis=0).sum() + (x @ x.T).sum() + p["t"][0, 0]

    plan = xla.PtqProvider("int8").plan(model, {"t": table}, x)
    assert "Rule(..., activations=True)" in plan.explain("matmul:0")


def test_a_rule_that_is_a_dictionary():
    with pytest.raises(TypeError, match=r"and names of presets, got \{"):
        xla.PtqProvider({"weight": "int8"})


def test_a_weight_that_the_function_closes_over_is_noted():
    w, x = jnp.ones((64, 32)), jnp.ones((8, 64))
    plan = xla.PtqProvider("int8").plan(lambda p, x: x @ w + p["b"], {"b": jnp.zeros(32)}, x)
    assert plan.problems == ()
    assert any("no parameter is stored: matmul:0 multiplies" in note for note in plan.notes)


def test_explain_says_what_lookups_and_integers_are():
    params = {"table": jnp.ones((16, 8)), "w": jnp.ones((8, 4)), "order": jnp.arange(3)}

    def model(p, x):
        return p["table"][x[p["order"]]] @ p["w"]

    plan = xla.PtqProvider("int8").plan(model, params, jnp.arange(3))
    lookup = plan.explain("take:1").splitlines()
    assert "no rule names lookups here, as one with ops=['take'] does" in lookup
    assert "it stays int32: " in plan.explain("order")
