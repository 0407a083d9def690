"""Plans with adapters: what they show and merge, and what is refused."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quant_numerics as qn
from jaxtap_testkit import examples
from jaxtap_testkit.xla_samples import block, draw, make
from provider_xla import (
    AdapterPlan,
    LoraRule,
    PtqProvider,
    QtProvider,
    QuantizationError,
    QuantizationRule,
    QuantizationWarning,
    Rule,
)

pytestmark = pytest.mark.sample(2)

QLORA = LoraRule(weight_qtype="int8", rank=2, alpha=3.0)


def dense(w, x):
    return x @ w


@pytest.fixture
def case():
    w, x = draw((8, 6), (4, 8))
    plan = PtqProvider(QLORA).plan(dense, w, x)
    return plan, w, x, plan.init_adapters(jax.random.key(0))


def test_the_table_shows_ranks(case):
    plan, *_ = case
    text = str(plan)
    assert "float x int8 + rank 2" in text
    assert "1 parameters have adapters: 28 numbers to train" in text
    assert plan.ops[0].adapter == "rank 2"
    found = json.loads(json.dumps(plan.as_json()))["adapters"]
    assert found[0]["shapes"] == {"a": [8, 2], "b": [2, 6]}
    assert found[0]["ops"] == ["matmul:0"]
    assert isinstance(plan.adapters["args[0]"], AdapterPlan)
    float_plan = PtqProvider(LoraRule(rank=2)).plan(dense, *draw((8, 6), (4, 8)))
    assert "float + rank 2" in str(float_plan)
    assert not float_plan.weights


@pytest.mark.slow
@examples(8)
@given(
    st.integers(1, 3),
    st.sampled_from(["int4", "nf4", "int8", "int5", None]),
    st.sampled_from([np.float32, jnp.bfloat16]),
    st.integers(0, 99),
)
def test_merge_adds_in_the_parameters_place(rank, qtype, dtype, seed):
    fn, x = block, draw((4, 8), dtype=dtype)[0]
    w = draw((8, 6), dtype=dtype, seed=seed)[0]
    plan = PtqProvider(LoraRule(weight_qtype=qtype, rank=rank, alpha=5)).plan(fn, w, x)
    stored = plan.quantize(w)
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(8, rank)), rng.normal(size=(rank, 6))
    adapters = {"args[0]": {"a": jnp.asarray(a, jnp.float32), "b": jnp.asarray(b, jnp.float32)}}
    found = plan.merge(stored, adapters)
    if qtype is None:
        base = np.asarray(w, np.float64)
    else:
        q = qn.unpack(stored) if isinstance(stored, qn.PackedQArray) else stored
        base = np.asarray(qn.dequantize(q), np.float64)
    expected = base + 5 / rank * a @ b
    assert found.dtype == w.dtype
    assert isinstance(found, jax.Array)
    unit = 2.0**-8 if dtype == jnp.bfloat16 else 2.0**-23
    # A rounding of the result, and some of the sums in it.
    bound = unit * (np.abs(expected) + 5 / rank * 4 * rank * np.abs(a) @ np.abs(b) * 2.0**-3)
    bound = np.maximum(bound, 4 * 2.0**-23 * (np.abs(base) + 5 * np.abs(a) @ np.abs(b)))
    assert (np.abs(np.asarray(found, np.float64) - expected) <= bound).all()


@pytest.mark.slow
def test_merged_parameters_are_quantized_again(case):
    plan, w, x, adapters = case
    adapters = jax.tree.map(lambda a: a + 0.1, adapters)
    stored = plan.quantize(w)
    float_w = plan.merge(stored, adapters)
    again = plan.quantize(float_w)
    assert isinstance(again, qn.QArray)
    scale = np.asarray(again.scale, np.float64)
    difference = np.asarray(qn.dequantize(again), np.float64) - np.asarray(float_w, np.float64)
    assert (np.abs(difference) <= 0.5001 * scale).all()
    np.testing.assert_allclose(
        plan.apply(dense)(float_w, x), plan.apply(dense)(again, x), rtol=1e-5, atol=1e-5
    )
    # From float parameters as well: the adapters are the same, the base is exact.
    exact = np.asarray(w, np.float64) + 1.5 * np.asarray(adapters["args[0]"]["a"], np.float64) @ (
        np.asarray(adapters["args[0]"]["b"], np.float64)
    )
    np.testing.assert_allclose(plan.merge(w, adapters), exact, rtol=1e-5, atol=1e-6)


def test_merge_leaves_the_rest():
    def fn(params, x):
        with jax.named_scope("first"):
            x = x @ params["u"]
        return x @ params["v"] + params["bias"]

    params = dict(zip(("u", "v", "bias"), draw((8, 6), (6, 7), (1, 7)), strict=True))
    rules = [QuantizationRule(module_path="first", weight_qtype="int8"), QLORA]
    plan = PtqProvider(rules).plan(fn, params, draw((4, 8))[0])
    assert list(plan.adapters) == ["args[0]['v']"]
    stored = plan.quantize(params)
    found = plan.merge(stored, plan.init_adapters(jax.random.key(0)))
    np.testing.assert_array_equal(found["u"], qn.dequantize(stored["u"]))
    np.testing.assert_array_equal(found["v"], qn.dequantize(stored["v"]))
    np.testing.assert_array_equal(found["bias"], params["bias"])


def test_one_parameter_has_one_adapter():
    fn, params, x = make("tied")
    rules = [LoraRule(op_names=["take"], weight_qtype="int8", rank=3), QLORA]
    with pytest.warns(
        QuantizationWarning, match="is ambiguous: rule 1 gives it an adapter of rank 2"
    ):
        plan = PtqProvider(rules).plan(fn, params, x)
    assert plan.adapters["args[0]['table']"].form.rank == 2  # the contraction's


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "LoraRule.rank must be a positive integer. Got 0."),
        ({"rank": 2.0}, "rank must be a positive integer. Got 2.0."),
        ({"rank": True}, "rank must be a positive integer. Got True."),
        ({"rank": 2, "alpha": "8"}, "alpha must be None or a finite number. Got '8'."),
        ({"rank": 2, "alpha": float("nan")}, "alpha must be None or a finite number. Got nan."),
        ({"rank": 2, "dropout": 1.0}, r"dropout must be a number in [0, 1). Got 1.0."),
        ({"rank": 2, "dropout": -0.1}, r"dropout must be a number in [0, 1). Got -0.1."),
    ],
)
def test_fields(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LoraRule(**fields)


def test_training_in_low_precision_has_no_adapters():
    message = "A rule for training must have no adapters: they are trained beside parameters"
    with pytest.raises(ValueError, match=message):
        Rule(weight="int8", lora=2, gradient="int8")
    with pytest.raises(ValueError, match=message):
        QtProvider(QLORA)


def raises(message):
    return pytest.raises(QuantizationError, match=message)


def test_ranks_that_are_too_large():
    w, x = draw((8, 6), (4, 8))
    with raises(
        r"args\[0\], an operand of matmul:0: rank 7 .* 8 contracted by 6 kept .* at most 6"
    ):
        PtqProvider(LoraRule(rank=7)).plan(dense, w, x)
    assert PtqProvider(LoraRule(rank=6)).plan(dense, w, x).adapters


def test_integer_parameters():
    with raises(r"Rule 0 .* args\[0\], .* it is int32\[8,6\], and only floats"):
        PtqProvider(LoraRule(rank=2)).plan(
            dense, jnp.ones((8, 6), jnp.int32), jnp.ones((4, 8), jnp.int32)
        )


def test_the_patch_engine():
    with raises("the patch engine can't hand"):
        PtqProvider(QLORA, engine="patch").plan(dense, *draw((8, 6), (4, 8)))


def test_derived_weights_get_no_adapter():
    with pytest.warns(QuantizationWarning, match=r"args\[0\] gets no adapter from matmul:0"):
        plan = PtqProvider(LoraRule(rank=2)).plan(lambda w, x: x @ (w * 2), *draw((8, 6), (4, 8)))
    assert not plan.adapters
    with raises("This plan has no adapters: no rule that asks for one decides"):
        plan.init_adapters(jax.random.key(0))
    with raises("This plan has no adapters"):
        plan.apply(dense)(*draw((8, 6), (4, 8)), adapters={})


def test_adapters_of_another_plan(case):
    plan, w, x, adapters = case
    run, pair = plan.apply(dense), adapters["args[0]"]
    wrong = {
        r"another plan: args\[0\]\['w'\] is a parameter that the adapters have": {
            **adapters, "args[0]['w']": pair,
        },
        r"another plan: args\[0\] is a parameter that the plan has and": {},
        r"args\[0\] \(rule 0, rank 2\) has f32\[8,3\] as 'a', but .* shape \[8, 2\]": {
            "args[0]": {**pair, "a": jnp.ones((8, 3))},
        },
        r"has int32\[2,6\] as 'b', but the plan needs floats": {
            "args[0]": {**pair, "b": jnp.ones((2, 6), jnp.int32)},
        },
        "must be a dict of arrays 'a' and 'b'": {"args[0]": pair["a"]},
        "adapters must be a dict by the paths of parameters": [pair],
    }  # fmt: skip
    for message, bad in wrong.items():
        with raises(message):
            run(w, x, adapters=bad)
        with raises(message):
            plan.merge(w, bad)


def test_calls_that_are_wrong(case):
    plan, w, x, adapters = case
    run = plan.apply(dense)
    with raises(r"args\[0\] is f32\[6,8\], but the plan has an adapter for it .* \[8, 6\]"):
        run(w.T, x, adapters=adapters)
    with raises("dropout_key is for adapters"):
        run(w, x, dropout_key=jax.random.key(0))
    with raises("must be one random key"):
        run(w, x, adapters=adapters, dropout_key=7)
    with raises("Adapters are floats"):
        plan.init_adapters(jax.random.key(0), jnp.int8)
    with raises("has an argument named adapters or dropout_key"):
        plan.apply(lambda w, x, adapters: x @ w)
    named = run(w=w, x=x, adapters=adapters)
    np.testing.assert_array_equal(named, run(w, x, adapters=adapters))
    # Without ranks they are the function's own.
    other = PtqProvider(QuantizationRule(weight_qtype="int8")).plan(dense, w, x)
    added = other.apply(lambda w, x, adapters: x @ w + adapters)
    assert added(other.quantize(w), x, adapters=1.0).shape == (4, 6)
