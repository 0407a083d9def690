"""Forward: both libraries within the bound of what rounding can do, and near one another."""

import dataclasses

import pytest
from bounds import SUMS, check, forward, grids, relative
from ops import BY_NAME, FORMATS, FP8, INT4, INT8, OPS
from runs import RUNS

REFUSED = {
    "ptq": {
        *(("conv", name) for name in ("w4a8", "w8", "w4", "fp8 weight")),
        *(("conv, strided", name) for name in ("w4a8", "w8", "w4", "fp8 weight")),
        *(("ragged_dot", name) for name in FORMATS),
    },
    "qt": {
        ("conv", "w4a8"),
        ("conv, strided", "w4a8"),
        *(("ragged_dot", name) for name in ("w8", "w4", "fp8 weight")),
    },
}
"""What Qwix raises for: see test_differences."""
for refused in REFUSED.values():
    names = ("dot_general", "dot_general, batched", "conv", "conv, strided")
    refused |= {(name, "w4a4") for name in names}


def compare(measured, mode, op, how, rule, x=None, w=None):
    """Runs both and checks both."""
    if x is None:
        x, w = op.draw()
    ours, qwixs = (run(op.fn, rule, w, x) for run in RUNS[mode])
    our_bound, qwix_bound = (forward(op, x, w, grids(op, rule, wide=z)) for z in (False, True))
    kinds = {rule["weight_qtype"], rule.get("act_qtype")} - {None}
    equal = kinds == {FP8} and not op.w_own
    row = (f"{op.name}, {mode}", how)
    check(measured, row, ours, qwixs, op.exact(x, w), our_bound, qwix_bound, equal=equal)


def cases():
    for mode in RUNS:
        for op in OPS:
            for name, (weight, act) in FORMATS.items():
                if (op.name, name) not in REFUSED[mode]:
                    rule = {"weight_qtype": weight, "act_qtype": act}
                    yield pytest.param(mode, op, name, rule, id=f"{mode}-{op.name}-{name}")


@pytest.mark.parametrize(("mode", "op", "name", "rule"), list(cases()))
def test_formats(measured, mode, op, name, rule):
    compare(measured, mode, op, name, rule)


@pytest.mark.parametrize("mode", RUNS)
@pytest.mark.parametrize("op", [BY_NAME["dot_general"], BY_NAME["conv"]], ids=lambda op: op.name)
@pytest.mark.parametrize("qtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize(
    "method", ["absmax,0.7", "absmax,1.5", "rms,2.5", "fixed,2.5", "fixed,-3,3"]
)
def test_calibration_methods(measured, mode, op, qtype, method):
    rule = {"weight_qtype": qtype, "act_qtype": qtype}
    rule |= {"weight_calibration_method": method, "act_calibration_method": method}
    compare(measured, mode, op, f"{qtype} {method}", rule)


@pytest.mark.parametrize("mode", RUNS)
@pytest.mark.parametrize("method", ["minmax", "minmax,0.8", "fixed,-1,3"])
@pytest.mark.parametrize("what", ["act", "weight"])
def test_zero_points(measured, mode, method, what):
    for op in [BY_NAME["dot_general"], BY_NAME["einsum"], BY_NAME["conv"]]:
        if op.name == "conv" and what == "weight":
            continue  # Qwix refuses that
        x, w = op.draw()
        x, w = (x + 0.5, w) if what == "act" else (x, w + 0.5)
        rule = {"weight_qtype": INT8, "act_qtype": INT8, f"{what}_calibration_method": method}
        compare(measured, mode, op, f"{what} {method}", rule, x, w)


@pytest.mark.parametrize("mode", RUNS)
@pytest.mark.parametrize("name", ["w8a8", "w4a4", "w4a8", "w4", "fp8"])
@pytest.mark.parametrize("tile", [8, 0.5])
def test_tiles(measured, mode, name, tile):
    weight, act = FORMATS[name]
    for op in OPS:
        # Qwix's QtProvider tiles another axis of an einsum: see test_differences.
        if op.tiled is None or (op.name, mode) == ("einsum", "qt"):
            continue
        rule = {"weight_qtype": weight, "act_qtype": act, "tile_size": tile}
        compare(measured, mode, op, f"{name}, tiles of {tile}", rule)


@pytest.mark.parametrize("mode", RUNS)
def test_a_third_of_an_axis_as_tile(measured, mode):
    rule = {"weight_qtype": INT4, "act_qtype": INT8, "tile_size": 1 / 3}
    compare(measured, mode, BY_NAME["dot_general"], "w4a8, tiles of 1/3", rule)


@pytest.mark.parametrize("mode", RUNS)
@pytest.mark.parametrize("name", ["w8a8", "w4a8", "w4", "fp8"])
def test_tiles_that_qwix_multiplies_in_integers(measured, mode, name):
    weight, act = FORMATS[name]
    op = dataclasses.replace(BY_NAME["dot_general"], x_shape=(8, 256), w_shape=(256, 12))
    rule = {"weight_qtype": weight, "act_qtype": act, "tile_size": 128}
    compare(measured, mode, op, f"{name}, tiles of 128", rule)


# Qwix does not read disable_channelwise_axes for a ragged_dot.
@pytest.mark.parametrize("op", [op for op in OPS if not op.w_own], ids=lambda op: op.name)
@pytest.mark.parametrize("name", ["w8a8", "w8", "fp8"])
def test_one_scale_for_all(measured, op, name):
    weight, act = FORMATS[name]
    rule = {"weight_qtype": weight, "act_qtype": act, "disable_channelwise_axes": True}
    compare(measured, "qt", op, f"{name}, one scale", rule)


def test_tiles_and_one_scale(measured):
    rule = {
        "weight_qtype": INT4,
        "act_qtype": INT8,
        "tile_size": 8,
        "disable_channelwise_axes": True,
    }
    compare(measured, "qt", BY_NAME["dot_general"], "w4a8, tiles of 8, one scale", rule)


@pytest.mark.parametrize("mode", RUNS)
@pytest.mark.parametrize("qtype", ["int2", "int3", "int5", "int6", "int7"])
def test_other_widths(measured, mode, qtype):
    compare(measured, mode, BY_NAME["dot_general"], qtype, {"weight_qtype": qtype})


@pytest.mark.parametrize("mode", RUNS)
def test_nf4(mode):
    op = BY_NAME["dot_general"]
    x, w = op.draw()
    ours, qwixs = (run(op.fn, {"weight_qtype": "nf4"}, w, x) for run in RUNS[mode])
    assert relative(ours, qwixs) < SUMS
