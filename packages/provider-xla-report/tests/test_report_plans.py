"""What a report says of plans: paths, batches, model objects, steps, many layers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import provider_xla as xla
from jaxtap_testkit.xla_samples import draw
from provider_xla import PtqProvider, QuantizationError, QuantizationRule
from provider_xla_report.page import page

W8 = QuantizationRule(weight_qtype="int8")


def test_a_batch_that_is_not_a_tuple():
    w, x = draw((64, 32), (4, 64))
    plan = PtqProvider("int4").plan(lambda w, x: x @ w, w, x)
    for batches in ([x], x, [{"x": x}]):
        with pytest.raises(QuantizationError, match=r"hold tuples.*\[\(x,\)\], got "):
            plan.report(w, batches=batches)


def test_a_weight_of_two_parameters_keeps_both_paths():
    params = {"q and k": draw((8, 8))[0], "v": draw((8, 8))[0], "small": draw((8, 2))[0]}
    x = jnp.abs(draw((4, 8))[0])

    def fn(p, x):
        table = jnp.concatenate([p["q and k"], p["v"]])
        return (x @ table.T) @ table @ p["small"] + table[x[:, 0].astype(int)].sum()

    plan = PtqProvider([W8]).plan(fn, params, x)
    both = ("args[0]['q and k']", "args[0]['v']")
    report = plan.report(params, x, time=False)
    rows = {op.op_id: op for op in report.ops}
    sizes = {one.path: one.bytes_before - one.bytes_after for one in report.parameters}
    assert rows["matmul:0"].paths == both
    first = report.table().splitlines()[2]
    assert f"{2 * 8 * 8 * 4} -> {2 * 8 * 8 * 4 - sizes[both[0]] - sizes[both[1]]}" in first
    assert report.sorted_ops("bytes")[-1].paths == ("args[0]['small']",)
    assert rows["take:0"].error.sqnr_db > 20


def test_a_model_object():
    eqx = pytest.importorskip("equinox")
    net = eqx.nn.MLP(16, 8, 4, 1, key=jax.random.key(0))
    model = xla.quantize_model(net, PtqProvider(W8), jnp.ones(16))
    assert xla.model_plan(model).report(net, jnp.ones(16), time=False).ops[0].flops == 2 * 16 * 4


@pytest.mark.slow
def test_a_report_shows_the_ranges_of_steps():
    def layer(c, w):
        return jnp.tanh(c @ w), None

    def program(w, x):
        return lax.scan(layer, 10 * x, w)[0], x @ w[0]

    W, X = draw((4, 8, 8))[0], draw((16, 8), seed=1)[0]
    static = QuantizationRule(
        weight_qtype="int8", act_qtype="int8", act_static_scale=True, act_batch_axes=()
    )
    plan = xla.PtqProvider([static]).plan(program, W, X)
    ranges = plan.calibrate(W, [(X,)])
    report = plan.report(W, X, statistics=ranges)
    steps, one = (op.ranges[0] for op in report.ops)
    assert (steps.steps, one.steps) == ((4,), ())
    np.testing.assert_allclose(steps.upper, ranges["scan(layer)/matmul:0#lhs"].upper.ravel())
    least, largest = min(steps.upper), max(steps.upper)
    for text in (str(report), page(report, "Report")):
        assert f"±{least:.3g} to ±{largest:.3g} in 4 steps" in text
        assert f"±{one.upper[0]:.3g}" in text
    assert report.as_json()["ops"][0]["ranges"][0]["steps"] == [4]


COUNT = 31  # of two quantized operations each: a table of 60 rows or more is folded


def model(params, x):
    for i, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ layer["up"]) @ layer["down"] * layer["scale"]
            x = x @ layer["skip"]
    return x


@pytest.fixture(scope="module")
def planned():
    rng = np.random.default_rng(0)

    def weight():
        return jnp.asarray(rng.standard_normal((8, 8)) / 3, jnp.float32)

    names = ("up", "down", "skip")
    layers = [{n: weight() for n in names} | {"scale": jnp.ones(8)} for _ in range(COUNT)]
    params = {"layers": layers}
    x = jnp.ones((2, 8))
    rules = [
        xla.QuantizationRule(weight_path=r".*'skip'.*"),
        xla.QuantizationRule(weight_qtype="int8"),
    ]
    return xla.PtqProvider(rules).plan(model, params, x, kernels=False), params, x


@pytest.mark.slow
def test_a_report_of_many_layers(planned, tmp_path):
    plan, params, x = planned
    report = plan.report(params, x, time=False)
    table = report.table()
    assert len(table.splitlines()) == 4, table
    assert f"layer_[0-{COUNT - 1}]/matmul:0" in table
    own = [op for op in report.ops if op.op_id.endswith("matmul:0")]
    row = next(line for line in table.splitlines() if "/matmul:0" in line)
    assert f"{min(op.error.sqnr_db for op in own):.1f}" in row
    assert f"{sum(op.flops for op in own) / 1e6:.3f}" in row
    assert len(report.table(top=5).splitlines()) == 8
    report.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    # Two rows of operations; every operation is there to be linked to, once.
    assert len(re.findall(r'<td class="whole" data-key', page)) == 2
    ids = re.findall(r'id="(op-\d+)"', page)
    assert sorted(ids) == sorted(f"op-{i}" for i in range(2 * COUNT))
    assert set(re.findall(r'href="#(op-\d+)"', page)) <= set(ids)
    assert f"{COUNT} parameters" in page
    assert f"{COUNT} operations" in page
