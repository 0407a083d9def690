"""Static ranges: measured on the same batches, by both libraries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from bounds import check, forward, grids
from ops import BY_NAME, FP8, INT8
from runs import KEY, Model

import provider_xla as xla


def batches(op, count=3):
    """Returns inputs whose ranges differ, and a parameter."""
    x, w = op.draw()
    rng = np.random.default_rng(2)
    return [jnp.asarray(rng.normal(size=x.shape) * (i + 1), jnp.float32) for i in range(count)], w


def mean_absmax(op, xs, axes):
    """Returns the mean, over batches and ``axes``, of the largest magnitude along the others."""
    others = tuple(a for a in range(len(op.x_shape)) if a not in axes)
    return np.mean([np.abs(np.asarray(x, np.float64)).max(axis=others).mean() for x in xs])


def our_ptq(op, rule, w, xs):
    """Returns the result for the last input."""

    def fn(params, x):
        return op.fn(x, params["w"])

    plan = xla.PtqProvider([xla.QuantizationRule(**rule)], strict=True).plan(fn, {"w": w}, xs[0])
    statistics = plan.calibrate({"w": w}, [(x,) for x in xs])
    return plan.apply(fn, statistics)(plan.quantize({"w": w}), xs[-1])


def qwix_ptq(op, rule, w, xs):
    """Returns the result for the last input, with the ranges of a training model."""
    rules = [qwix.QuantizationRule(**rule)]
    model = Model(op.fn, w.shape, w.dtype)
    training = qwix.quantize_model(model, qwix.QtProvider(rules))
    state = {}
    for x in xs:
        _, state = training.apply({"params": {"w": w}, **state}, x, mutable=["quant_stats"])
    quantized = qwix.quantize_model(model, qwix.PtqProvider(rules))
    kinds = jax.eval_shape(quantized.init, KEY, xs[0])["params"]
    params = qwix.quantize_params({"w": w}, kinds, state["quant_stats"])
    return quantized.apply({"params": params}, xs[-1])


def our_qt(op, rule, w, xs):
    """Returns the result of the last of some training steps."""

    def fn(params, x):
        return op.fn(x, params["w"])

    provider = xla.QtProvider([xla.QuantizationRule(**rule)], strict=True)
    statistics = provider.init_statistics(fn, {"w": w}, xs[0])
    step = provider.apply(fn, statistics)
    return [step({"w": w}, x) for x in xs][-1]


def qwix_qt(op, rule, w, xs):
    """Returns the result of the last of some training steps."""
    provider = qwix.QtProvider([qwix.QuantizationRule(**rule)])
    model = qwix.quantize_model(Model(op.fn, w.shape, w.dtype), provider)
    state, result = {}, None
    for x in xs:
        result, state = model.apply({"params": {"w": w}, **state}, x, mutable=["quant_stats"])
    return result


RUNS = {"ptq": (our_ptq, qwix_ptq), "qt": (our_qt, qwix_qt)}


@pytest.mark.parametrize("mode", RUNS)
@pytest.mark.parametrize("qtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize(
    ("name", "axes"),
    [("dot_general", (0,)), ("conv", (0,)), ("einsum", (0, 1)), ("dot_general, batched", (0, 1))],
)
def test_static_ranges(measured, mode, qtype, name, axes):
    op = BY_NAME[name]
    xs, w = batches(op)
    rule = {"weight_qtype": qtype, "act_qtype": qtype, "act_static_scale": True}
    rule |= {"act_batch_axes": axes}
    ours, qwixs = (run(op, rule, w, xs) for run in RUNS[mode])
    # That is the same as a fixed range; the last batch is wider than the mean, and clipped.
    bound = mean_absmax(op, xs, axes)
    assert bound < np.abs(xs[-1]).max()
    fixed = rule | {"act_calibration_method": f"fixed,{bound}"}
    limits = [forward(op, xs[-1], w, grids(op, fixed, wide=z)) for z in (False, True)]
    row = (f"{name}, {mode}", f"{qtype}, static")
    check(measured, row, ours, qwixs, op.exact(xs[-1], w), *limits, equal=qtype == FP8)


@pytest.mark.parametrize("mode", RUNS)
def test_static_ranges_with_a_zero_point(measured, mode):
    op = BY_NAME["dot_general"]
    xs, w = batches(op)
    xs = [x + 1 for x in xs]
    rule = {"weight_qtype": INT8, "act_qtype": INT8, "act_static_scale": True}
    rule |= {"act_calibration_method": "minmax"}
    ours, qwixs = (run(op, rule, w, xs) for run in RUNS[mode])
    low, high = (
        np.mean([getattr(np.asarray(x, np.float64), end)(axis=1).mean() for x in xs])
        for end in ("min", "max")
    )
    fixed = rule | {"act_calibration_method": f"fixed,{low},{high}"}
    limits = [forward(op, xs[-1], w, grids(op, fixed, wide=z)) for z in (False, True)]
    row = (f"{op.name}, {mode}", "int8 minmax, static")
    check(measured, row, ours, qwixs, op.exact(xs[-1], w), *limits, equal=False)
