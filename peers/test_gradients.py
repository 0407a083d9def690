"""Gradients: both libraries within the bound of what rounding can do, and near one another."""

import numpy as np
import pytest
from bounds import SUMS, backward, check, grids, relative
from ops import BY_NAME, FORMATS, FP8, INT8, OPS
from runs import gradients, our_qt, qwix_qt

SIDES = ("by the input", "by the parameter")


def draw(op):
    """Returns an input, a parameter, and a cotangent."""
    x, w = op.draw()
    result = op.exact(x, w)
    rng = np.random.default_rng(1)
    return x, w, np.asarray(rng.normal(size=result.shape), np.float32)


def both(op, rule, w, x, cotangent):
    """Returns the gradients of each library."""
    return tuple(gradients(run, op.fn, rule, w, x, cotangent) for run in (our_qt, qwix_qt))


# --- float backward pass: straight through -------------------------------------------------------

DOTS = [op for op in OPS if op.name in ("dot_general", "dot_general, batched", "einsum")]


@pytest.mark.parametrize("op", DOTS, ids=lambda op: op.name)
@pytest.mark.parametrize("name", ["w8a8", "w4a8", "w8", "w4", "fp8"])
def test_without_bwd_qtype(measured, op, name):
    """The gradients of the float operation, at the operands as they were before rounding."""
    weight, act = FORMATS[name]
    rule = {"weight_qtype": weight, "act_qtype": act}
    x, w, g = draw(op)
    for side, (ours, qwixs) in enumerate(zip(*both(op, rule, w, x, g), strict=True)):
        other = (w, x)[side]
        exact = op.exact_gradient(side, g, other)
        bound = SUMS * op.exact_gradient(side, np.abs(g), np.abs(other)), 0.0
        row = (f"{op.name} {SIDES[side]}", f"{name}, float bwd")
        check(measured, row, ours, qwixs, exact, bound, bound, equal=True)


@pytest.mark.parametrize(
    ("qtype", "method", "tile"),
    [
        (INT8, "absmax,0.7", None),
        (INT8, "absmax,0.7", 8),
        (INT8, "absmax,1.5", None),
        (INT8, "rms,1.5", None),
        (INT8, "fixed,1.5", None),
        (FP8, "fixed,-2,2", None),
        (FP8, "rms,1.5", 8),
    ],
)
def test_zero_outside_of_the_range(measured, qtype, method, tile):
    op = BY_NAME["dot_general"]
    rule = {"weight_qtype": qtype, "act_qtype": qtype, "tile_size": tile}
    rule |= {"weight_calibration_method": method, "act_calibration_method": method}
    x, w, g = draw(op)
    pair = grids(op, rule, wide=False)
    for side, (ours, qwixs) in enumerate(zip(*both(op, rule, w, x, g), strict=True)):
        operand, other = ((x, w), (w, x))[side]
        inside = pair[side].inside(operand)
        assert inside.all() == (method == "absmax,1.5")
        exact = op.exact_gradient(side, g, other) * inside
        bound = SUMS * op.exact_gradient(side, np.abs(g), np.abs(other)), 0.0
        row = (f"{op.name} {SIDES[side]}", f"{qtype} {method}, tile {tile}, float bwd")
        check(measured, row, ours, qwixs, exact, bound, bound, equal=True)


@pytest.mark.parametrize("what", ["act", "weight"])
def test_zero_points(measured, what):
    op = BY_NAME["dot_general"]
    rule = {"weight_qtype": INT8, "act_qtype": INT8, f"{what}_calibration_method": "minmax,0.8"}
    x, w, g = draw(op)
    pair = grids(op, rule, wide=False)
    for side, (ours, qwixs) in enumerate(zip(*both(op, rule, w, x, g), strict=True)):
        operand, other = ((x, w), (w, x))[side]
        exact = op.exact_gradient(side, g, other) * pair[side].inside(operand)
        bound = SUMS * op.exact_gradient(side, np.abs(g), np.abs(other)), 0.0
        row = (f"{op.name} {SIDES[side]}", f"{what} minmax,0.8, float bwd")
        check(measured, row, ours, qwixs, exact, bound, bound, equal=True)


# --- quantized backward pass ---------------------------------------------------------------------


def compare(measured, op, how, rule):
    """Runs both and checks both."""
    x, w, g = draw(op)
    for side, (ours, qwixs) in enumerate(zip(*both(op, rule, w, x, g), strict=True)):
        inside = grids(op, rule, wide=False)[side].inside((x, w)[side])
        exact = op.exact_gradient(side, g, (w, x)[side]) * inside
        our_bound, qwix_bound = (
            backward(op, side, x, w, g, grids(op, rule, wide=z), rule, wide=z)
            for z in (False, True)
        )
        kinds = {rule["weight_qtype"], rule["act_qtype"], rule["bwd_qtype"]} - {None}
        equal = kinds == {FP8} and not op.w_own
        row = (f"{op.name} {SIDES[side]}", how)
        check(measured, row, ours, qwixs, exact, our_bound, qwix_bound, equal=equal)


BWD = {
    "w8a8, bwd int8": (INT8, INT8, INT8),
    "w8, bwd int8": (INT8, None, INT8),
    "fp8, bwd fp8": (FP8, FP8, FP8),
    "fp8 weight, bwd fp8": (FP8, None, FP8),
}


# Qwix refuses a ragged_dot of which the weight alone is quantized.
CASES = [
    pytest.param(op, name, id=f"{op.name}-{name}")
    for op in OPS
    for name, (_, act, _) in BWD.items()
    if act is not None or op.name != "ragged_dot"
]


@pytest.mark.parametrize(("op", "name"), CASES)
def test_with_bwd_qtype(measured, op, name):
    weight, act, bwd = BWD[name]
    compare(measured, op, name, {"weight_qtype": weight, "act_qtype": act, "bwd_qtype": bwd})


@pytest.mark.parametrize("op", [*DOTS, BY_NAME["conv"]], ids=lambda op: op.name)
@pytest.mark.parametrize("name", ["w8a8, bwd int8", "fp8, bwd fp8"])
def test_one_scale_for_all(measured, op, name):
    weight, act, bwd = BWD[name]
    rule = {"weight_qtype": weight, "act_qtype": act, "bwd_qtype": bwd}
    compare(measured, op, f"{name}, one scale", rule | {"disable_channelwise_axes": True})


@pytest.mark.parametrize("op", [BY_NAME["dot_general"], BY_NAME["conv"]], ids=lambda op: op.name)
@pytest.mark.parametrize("method", ["rms,3", "absmax,0.8"])
def test_calibration_of_the_cotangent(measured, op, method):
    rule = {"weight_qtype": INT8, "act_qtype": INT8, "bwd_qtype": INT8}
    rule |= {"bwd_calibration_method": method}
    compare(measured, op, f"w8a8, bwd int8 {method}", rule)


@pytest.mark.parametrize("method", ["absmax,0.8", "fixed,1.5"])
def test_zero_outside_of_the_range_with_bwd_qtype(measured, method):
    rule = {"weight_qtype": INT8, "act_qtype": INT8, "bwd_qtype": INT8}
    rule |= {"weight_calibration_method": method, "act_calibration_method": method}
    compare(measured, BY_NAME["dot_general"], f"w8a8 {method}, bwd int8", rule)


@pytest.mark.parametrize("tile", [4, 1 / 3])
@pytest.mark.parametrize("name", BWD)
def test_tiles_of_the_weight_gradient(measured, name, tile):
    weight, act, bwd = BWD[name]
    rule = {"weight_qtype": weight, "act_qtype": act, "bwd_qtype": bwd}
    rule |= {"bwd_weight_grad_tile_size": tile}
    compare(measured, BY_NAME["dot_general"], f"{name}, tiles of {tile:.3g}", rule)


def test_tiles_of_the_weight_gradient_are_finer():
    """The bound that they are held to above is that of the whole axis: here they are better."""
    op = BY_NAME["dot_general"]
    x, w, g = draw(op)
    g[0] *= 1000  # a row that takes the steps from all the others, but not from other tiles
    exact = op.exact_gradient(1, g, x)[..., 1:]
    rule = {"weight_qtype": INT8, "act_qtype": INT8, "bwd_qtype": INT8}
    for run in (our_qt, qwix_qt):
        plain = gradients(run, op.fn, rule, w, x, g)[1]
        tiled = gradients(run, op.fn, rule | {"bwd_weight_grad_tile_size": 4}, w, x, g)[1]
        assert relative(tiled[..., 1:], exact) < relative(plain[..., 1:], exact)
