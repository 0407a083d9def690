"""Reports: each number beside one that NumPy computes in float64, or XLA counts."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from interception_core import JaxtapError
from jaxtap_testkit.xla_samples import make
from provider_xla import (
    PtqProvider,
    QtProvider,
    QtRule,
    QuantizationError,
    QuantizationRule,
)

pytestmark = pytest.mark.sample(2)

W8 = QuantizationRule(weight_qtype="int8")
W8A8 = QuantizationRule(weight_qtype="int8", act_qtype="int8")
W4 = QuantizationRule(weight_qtype="int4")


def rows(seed, *shape):
    return np.asarray(np.random.default_rng(seed).normal(size=shape), np.float32)


def reported(fn, params, *batch, rules=W8A8, provider=PtqProvider, time=False, **options):
    engine = options.pop("engine", None)
    plan = provider(rules, engine=engine).plan(fn, params, *(batch or options["batches"][0]))
    return plan.report(params, *batch, time=time, **options)


def rounded(x, axes, top):
    """Quantized values and scales in float64: the largest magnitude along ``axes`` is the code
    ``top``.
    """
    x = np.asarray(x, np.float64)
    scale = np.abs(x).max(axes, keepdims=True).astype(np.float32).astype(np.float64) / top
    return np.rint(x / scale) * scale


def sqnr(expected, found):
    return 10 * np.log10(np.square(expected).sum() / np.square(found - expected).sum())


def check(error, expected, found, about=0.02):
    """A code at a tie may be the other one: then the ratio differs, by little."""
    assert error.sqnr_db == pytest.approx(sqnr(expected, found), abs=about)
    relative = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error.relative == pytest.approx(relative, rel=about)
    assert error.max_abs_error == pytest.approx(np.abs(found - expected).max(), rel=0.02)


@pytest.mark.parametrize("engine", ["trace", "patch"])
@pytest.mark.parametrize(
    ("rule", "top", "acts"), [(W8, 127, False), (W8A8, 127, True), (W4, 7, False)]
)
def test_a_contraction(rule, top, acts, engine):
    w, x = rows(0, 32, 24), rows(1, 16, 32)

    def fn(w, x):
        return jnp.tanh(x @ w)

    report = reported(fn, w, x, rules=rule, engine=engine, time=engine == "patch")
    (op,) = report.ops
    qvalue = rounded(w, 0, top)
    expected = np.float64(x) @ np.float64(w)
    found = (rounded(x, 1, 127) if acts else np.float64(x)) @ qvalue
    check(op.error, expected, found)
    assert op.calls == 1
    assert op.flops == 2 * 16 * 32 * 24
    assert op.steps == ()
    (output,) = report.outputs
    expected, found = np.tanh(expected), np.tanh(found)
    check(output.error, expected, found)
    cosine = (expected * found).sum() / np.sqrt(np.square(expected).sum() * np.square(found).sum())
    assert output.cosine == pytest.approx(cosine, abs=1e-6)
    assert output.shape == (16, 24)
    (parameter,) = report.parameters
    check(parameter.error, np.float64(w), qvalue)
    assert parameter.bytes_before == 32 * 24 * 4
    assert parameter.bytes_after == 32 * 24 * (1 if top == 127 else 0.5) + 24 * 4


@pytest.mark.slow
def test_batches_are_added_up():
    w, batches = rows(0, 8, 6), [(rows(1, 4, 8),), (10 * rows(2, 4, 8),)]
    report = reported(lambda w, x: x @ w, w, rules=W8, batches=batches)
    x = np.concatenate([np.float64(x) for (x,) in batches])
    check(report.ops[0].error, x @ np.float64(w), x @ rounded(w, 0, 127))
    check(report.outputs[0].error, x @ np.float64(w), x @ rounded(w, 0, 127))
    assert report.batches == 2
    assert report.ops[0].calls == 1


@pytest.mark.slow
def test_the_steps_of_a_scan():
    w, x = rows(0, 3, 8, 8) / 3, rows(1, 6, 8)
    w[1] *= np.linspace(0.01, 1, 8, dtype=np.float32)[:, None]

    def fn(w, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    report = reported(fn, w, x, rules=W4)
    (op,) = report.ops
    value, pairs = np.float64(x), []
    for step in np.float64(w):
        pairs.append((value @ step, value @ rounded(step, 0, 7)))
        value = np.tanh(value @ step)
    assert op.calls == 3
    assert op.flops == 3 * 2 * 6 * 8 * 8
    for error, pair in zip(op.steps, pairs, strict=True):
        check(error, *pair)
    check(op.error, *map(np.stack, zip(*pairs, strict=True)))


def test_what_is_mapped_counts_each_time():
    w, x = rows(0, 8, 6), rows(1, 5, 8)
    report = reported(lambda w, x: jax.vmap(lambda row: row @ w)(x), w, x, time=True)
    (op,) = report.ops
    check(op.error, np.float64(x) @ np.float64(w), rounded(x, 1, 127) @ rounded(w, 0, 127))
    assert op.calls == 5
    assert op.flops == 2 * 5 * 8 * 6


def test_parameters_that_are_mapped_over():
    w, x = jnp.asarray(rows(0, 3, 8, 6), jnp.bfloat16), rows(1, 5, 8)
    fn = jax.vmap(lambda w, x: lax.dot(x, w, preferred_element_type=jnp.float32), (0, None))
    (op,) = reported(fn, w, x, rules=[]).float_ops
    assert op.flops == 3 * 2 * 5 * 8 * 6


@pytest.mark.slow
def test_the_error_is_that_of_what_is_stored():
    """Both contractions have one scale for all of the parameter, which each alone would not."""
    w, x = rows(0, 8, 6), rows(1, 4, 8)
    w *= np.geomspace(0.1, 1, 6, dtype=np.float32)
    report = reported(lambda w, x: jnp.tanh(x @ w) @ w.T, w, x, rules=W8)
    qvalue = rounded(w, None, 127)
    first, second = report.ops
    hidden = np.tanh(np.float64(x) @ np.float64(w))
    check(first.error, np.float64(x) @ np.float64(w), np.float64(x) @ qvalue)
    check(second.error, hidden @ np.float64(w).T, hidden @ qvalue.T)
    assert abs(first.error.sqnr_db - sqnr(x @ w, x @ rounded(w, 0, 127))) > 0.5


@pytest.mark.slow
def test_lookups():
    table, ids = rows(0, 16, 8), np.array([[3, 1, 3], [0, 15, 2]])
    rules = QuantizationRule(op_names=["take"], weight_qtype="int4")
    report = reported(lambda t, ids: jnp.take(t, ids, axis=0), table, ids, rules=rules)
    (op,) = report.ops
    check(op.error, np.float64(table)[ids], rounded(table, 1, 7)[ids])
    assert (op.op_name, op.flops, op.seconds) == ("take", 0, None)


@pytest.mark.slow
def test_qvalue_of_odd_bits():
    w, x = rows(0, 16, 8), rows(1, 4, 16)
    report = reported(
        lambda w, x: x @ w, w, x, rules=QuantizationRule(weight_qtype="int5"), time=True
    )
    check(report.ops[0].error, np.float64(x) @ np.float64(w), np.float64(x) @ rounded(w, 0, 15))


@pytest.mark.slow
def test_training_rules():
    w, x = rows(0, 16, 8), rows(1, 4, 16)
    rule = QtRule(weight_qtype="int8", bwd_qtype="int8")
    report = reported(lambda w, x: x @ w, w, x, rules=rule, provider=QtProvider)
    check(report.ops[0].error, np.float64(x) @ np.float64(w), np.float64(x) @ rounded(w, 0, 127))


def test_a_branch_that_is_not_taken():
    fn, params, x = make("cond")
    report = reported(fn, params, x)
    taken = sorted(report.ops, key=lambda op: op.calls)
    assert [op.calls for op in taken] == [0, 1]
    assert taken[0].error.sqnr_db is None
    assert taken[0].error.max_abs_error is None
    assert taken[0].flops == 0
    assert taken[1].error.sqnr_db > 30


def test_no_error_and_no_signal():
    w = np.eye(4, dtype=np.float32) * 127
    exact = reported(lambda w, x: x @ w, w, rows(0, 3, 4), rules=W8)
    assert exact.ops[0].error.sqnr_db == math.inf
    assert exact.as_json()["ops"][0]["error"] == {"sqnr_db": None, "max_abs_error": 0.0}
    nothing = reported(lambda w, x: x @ w, w, np.zeros((3, 4), np.float32), rules=W8)
    assert nothing.outputs[0].cosine is None


def test_values_that_are_not_finite():
    x = rows(0, 3, 4)
    x[1, 1] = np.inf
    report = reported(lambda w, x: x @ w, rows(1, 4, 4), x, rules=W8)
    assert report.ops[0].error.sqnr_db is None
    assert report.ops[0].error.max_abs_error is None
    assert report.worst_output is None
    json.dumps(report.as_json(), allow_nan=False)


def test_outputs_of_all_kinds():
    w, x = rows(0, 8, 6), rows(1, 32, 8)

    def fn(w, x):
        y = x @ w
        return {"best": y.argmax(-1), "wave": lax.complex(y, y), "key": jax.random.key(0), "n": 3}

    report = reported(fn, w, x, rules=QuantizationRule(weight_qtype="int2"))
    by_path = {output.path: output for output in report.outputs}
    y, found = np.float64(x) @ w, np.float64(x) @ rounded(w, 0, 1)
    same = (y.argmax(-1) == found.argmax(-1)).mean()
    assert by_path["['best']"].equal == pytest.approx(same, abs=1e-6)
    assert by_path["['best']"].error is None
    assert by_path["['wave']"].error.sqnr_db == pytest.approx(sqnr(y, found), abs=0.02)
    assert by_path["['key']"].equal == 1
    assert len(by_path) == 3


def dots(p, x):
    return jnp.einsum("abi,aij->baj", x, p["a"]) @ p["b"]


def grouped_conv(p, x):
    return lax.conv_general_dilated(
        x, p, (2, 1), "VALID", feature_group_count=2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "params", "x"),
    [
        (dots, {"a": (3, 8, 6), "b": (6, 5)}, (3, 4, 8)),
        (grouped_conv, (3, 3, 2, 6), (2, 9, 8, 4)),
        (lambda p, x: jnp.tensordot(x, p, 2), (3, 4, 5), (7, 3, 4)),
    ],
)
def test_operations_are_those_that_xla_counts(fn, params, x):
    params = jax.tree.map(lambda s: rows(0, *s), params, is_leaf=lambda s: isinstance(s, tuple))
    x = rows(1, *x)
    report = reported(fn, params, x)
    counted = jax.jit(fn).lower(params, x).cost_analysis()["flops"]
    assert sum(op.flops for op in report.ops) == counted
    # Those that stay float count as well.
    kept = reported(fn, params, x, rules=[])
    assert sum(op.flops or 0 for op in kept.float_ops) == counted
    assert (report.flops_quantized, kept.flops_quantized) == (1, 0)


def test_what_stays_float_and_why():
    params = {"w": rows(0, 8, 8), "v": rows(2, 8, 8), "b": rows(3, 8)}
    rules = [
        QuantizationRule(module_path="head"),
        QuantizationRule(module_path="body", weight_qtype="int8"),
    ]

    def fn(p, x):
        with jax.named_scope("body"):
            x = x @ p["w"]
        with jax.named_scope("head"):
            x = x @ p["v"] + p["b"][None]
        return jnp.dot(x, x.T)

    report = reported(fn, params, rows(1, 4, 8), rules=rules)
    assert [op.op_id for op in report.ops] == ["body/matmul:0"]
    left = {op.op_id: (op.reason, op.flops) for op in report.float_ops}
    assert left == {
        "head/matmul:0": ("the rule leaves it float", 2 * 4 * 8 * 8),
        "dot_general:0": ("no rule matches", 2 * 4 * 8 * 4),
    }
    assert report.flops_quantized == pytest.approx(512 / (512 + 512 + 256))
    assert report.bytes_float == (64 + 8) * 4
    assert report.bytes_before == (64 + 64 + 8) * 4
    assert report.bytes_after == report.bytes_float + 64 + 8 * 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Static ranges cut off")
def test_static_ranges():
    w, x = rows(0, 8, 6), rows(1, 4, 8)
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    plan = PtqProvider(rule).plan(lambda w, x: x @ w, w, x)
    with pytest.raises(JaxtapError, match="pass them as statistics="):
        plan.report(w, x, time=False)
    statistics = plan.calibrate(w, [(2 * x,)])
    report = plan.report(w, x, statistics=statistics)
    scale = np.abs(2 * x).max(1).astype(np.float64).mean() / 127
    found = np.clip(np.rint(x / scale), -127, 127) * scale @ rounded(w, 0, 127)
    check(report.ops[0].error, np.float64(x) @ np.float64(w), found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scan of remat", "experts", "convolution"])
def test_times(name):
    fn, params, x = make(name)
    report = reported(fn, params, x, time=True)
    assert all(op.seconds > 0 and op.float_seconds > 0 for op in report.ops)
    assert report.seconds > 0
    shares = [op.share for op in report.ops]
    assert all(0 < share <= 1 for share in shares)
    assert sum(shares) + report.rest_share == pytest.approx(1)
    if name == "experts":  # each row is multiplied with the matrix of its group alone
        assert [op.flops for op in report.ops] == [2 * 12 * 8 * 6] * 2


@pytest.mark.slow
def test_equal_operations_are_timed_once(monkeypatch):
    from provider_xla_report import timing

    made = []
    monkeypatch.setattr(timing._Call, "seconds", lambda call: made.append(call.key) or (1.0, 2.0))
    w, x = list(rows(0, 4, 8, 8)), rows(1, 3, 8)

    def fn(w, x):
        return functools.reduce(jnp.matmul, w, x) @ jnp.ones((8, 2))

    report = reported(fn, w, x, time=True)
    assert len(report.ops) == 5
    assert len(made) == 2
    assert [op.seconds for op in report.ops] == [2.0] * 5


def test_orders():
    params = {
        "big": rows(0, 8, 64),
        "small": rows(1, 64, 2) * np.geomspace(1e-3, 1, 64)[:, None].astype(np.float32),
    }
    report = reported(lambda p, x: (x @ p["big"]) @ p["small"], params, rows(2, 4, 8))
    first, second = report.ops
    assert report.sorted_ops() == [first, second]
    assert report.sorted_ops("bytes") == [first, second]
    assert report.sorted_ops("flops") == [first, second]
    worst = min(report.ops, key=lambda op: op.error.sqnr_db)
    assert report.sorted_ops("sqnr")[0] == worst
    lines = report.table("sqnr", top=1).splitlines()
    assert lines[2].startswith(worst.op_id)
    assert lines[-1] == "and 1 more"
    with pytest.raises(ValueError, match="by program, sqnr, error, flops, time, bytes, not by 'x'"):
        report.sorted_ops("x")


def test_text_and_json():
    fn, params, x = make("tied")
    report = reported(fn, params, x)
    text = str(report)
    for op in report.ops:
        assert op.op_id in text
    assert "3 of 3 operations quantized, 100.0% of the multiplications" in text
    content = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert content["schema"] == 2
    assert content["summary"]["bytes_after"] == report.bytes_after
    assert content["summary"]["seconds"] is None
    assert [op["op_id"] for op in content["ops"]] == [op.op_id for op in report.ops]


def test_wrong_arguments():
    w, x = rows(0, 8, 6), rows(1, 4, 8)
    plan = PtqProvider(W8).plan(lambda w, x: x @ w, w, x)
    with pytest.raises(TypeError, match="not both"):
        plan.report(w, x, batches=[(x,)])
    with pytest.raises(QuantizationError, match="batches is empty"):
        plan.report(w, batches=[])
    with pytest.raises(QuantizationError, match="the plan was made for"):
        plan.report(w.T, x)
