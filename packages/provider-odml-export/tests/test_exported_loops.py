"""Loops and branches in files: a range for each step of a scan, all branches that data can take."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import provider_odml as odml
from jaxtap_testkit.odml_loops import PROGRAMS, RULES, W, X, branches, error, forms, while_loop


def exported(fn, w, rules=RULES):
    stats = odml.qat(fn, rules).calibrate(w, [(X,)])
    artifact = odml.export(fn, w, stats, rules, X)
    (actual,) = artifact.run(x=X).values()
    return artifact, error(actual, fn(w, X))


def test_a_scan_is_exported_with_a_range_for_each_step():
    rolled, written = forms("scan")
    artifact, ours = exported(rolled, W)
    assert ours <= 1.5 * exported(written, W)[1]
    scales = {one.place: one.scale for one in artifact.report.sites}
    assert scales["scan(layer)[0]/dot_general:0#0"] > 5 * scales["scan(layer)[1]/dot_general:0#0"]
    assert artifact.report.float_ops == 0
    assert artifact.report.warnings == ()
    for one in artifact.report.sites:
        assert one.float_sqnr > 15
    assert "to float" in str(artifact.report)


@pytest.mark.slow
def test_loops_are_exported_as_if_they_were_written_out():
    names = [name for name in PROGRAMS if name != "scan"]
    errors = []
    for fn in forms(*names):
        stats = odml.qat(fn, RULES).calibrate(W, [(X,)])
        device = odml.export(fn, W, stats, RULES, X).run(x=X)
        found = zip(sorted(names), device.values(), strict=True)
        exact = fn(W, X)
        errors.append({name: error(value, exact[name]) for name, value in found})
    ours, own = errors
    for name in names:
        assert ours[name] <= 1.5 * own[name], name


@pytest.mark.slow
def test_a_cond_in_a_scan_is_exported():
    def rolled(w, x):
        return branches(lax.scan, w, x)

    artifact, ours = exported(rolled, W)
    assert ours < 0.3
    assert artifact.report.warnings == ()


def products(w, x):
    """Branches whose results are integers of scales of their own, and read by a product."""
    y = lax.cond(x[0, 0] > 0, lambda: jnp.tanh(x @ w[0]), lambda: jnp.tanh(x @ w[1]) / 4)
    return lax.switch(jnp.int32(x[0, 0] > 0), [lambda y: y @ w[2], lambda y: y @ w[3]], y)


@pytest.mark.parametrize("output_qtype", ["int8", None])
def test_branches_are_exported(output_qtype):
    """Both are right, not that of the sample data alone: LiteRT's IF gets one of them wrong."""
    rules = [odml.OdmlRule(weight_qtype="int8", output_qtype=output_qtype)]
    stats = None
    if output_qtype is not None:
        stats = odml.qat(products, rules).calibrate(W, [(X,), (-X,)])
    artifact = odml.export(products, W, stats, rules, X)
    for x in (X, -X):
        (actual,) = artifact.run(x=x).values()
        assert error(actual, products(W, x)) < 0.1
    assert "IF" not in artifact.report.ops


def test_branches_that_begin_with_one_product():
    """The converter computes it once, so that it has one scale for both."""

    def fn(w, x):
        taken = x[0, 0] > 0
        first = lax.cond(taken, lambda: x.T @ x, lambda: x.T @ x * 2.0)
        # A range of 0 and more in one branch, and of less than 0 in the other.
        second = lax.cond(taken, lambda: jnp.exp(x @ w[0]), lambda: jnp.tanh(x @ w[0]))
        return first, second

    stats = odml.qat(fn, RULES).calibrate(W, [(X,), (-X,)])
    artifact = odml.export(fn, W, stats, RULES, X)
    scales = {one.place: one.scale for one in artifact.report.sites}
    products = [scales[f"cond(<lambda>)/dot_general:{i}"] for i in range(4)]
    assert products[0] == products[1]
    assert products[2] == products[3]
    for x in (X, -X):
        for found, exact in zip(artifact.run(x=x).values(), fn(W, x), strict=True):
            assert error(found, exact) < 0.1


def test_branches_that_no_data_can_take_are_left_out():
    def fn(w, x):
        y = lax.cond(True, lambda: jnp.tanh(x @ w[0]), lambda: x @ w[1])
        return lax.switch(2, [lambda y: y * 9, lambda y: y @ w[2], lambda y: y @ w[3]], y)

    artifact = odml.export(fn, W, odml.qat(fn, RULES).calibrate(W, [(X,)]), RULES, X)
    (actual,) = artifact.run(x=X).values()
    assert error(actual, np.tanh(X @ W[0]) @ W[3]) < 0.1
    assert artifact.report.ops["FULLY_CONNECTED"] == 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("switch", [False, True])
def test_branches_that_calibration_did_not_take(switch):
    """The input is read in either, so that the one that was taken tells its range."""

    def fn(w, x):
        branches = [lambda: x @ w[0], lambda: x @ w[1]]
        taken = x[0, 0] > 1e9
        return lax.switch(1 - jnp.int32(taken), branches) if switch else lax.cond(taken, *branches)

    stats = odml.qat(fn, RULES).calibrate(W, [(X,)])
    text = (
        r"got none of (cond|switch)\(<lambda>\)/dot_general:\d\. .* No data took (cond|switch)\(<"
    )
    with pytest.raises(odml.ManifestError, match=text):
        odml.export(fn, W, stats, RULES, X)


@pytest.mark.slow
def test_a_while_loop_is_exported():
    """It stays a loop, whose first step is compared."""
    artifact, ours = exported(while_loop, W[0])
    assert ours < 0.5
    places = [one.place for one in artifact.report.sites]
    assert any("dot_general:0" in place for place in places)
    assert "WHILE" in artifact.report.ops


def test_a_range_that_cuts_off_is_warned_of():
    """The file agrees with fake quantization, which has the same ranges, and not with floats."""

    def fn(w, x):
        return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])

    stats = odml.qat(fn, RULES).calibrate(W, [(X,)])
    key = "dot_general:1"
    bad = stats.with_state(stats.state.at[stats.row(key), :2].multiply(0.1))
    with pytest.warns(odml.OdmlWarning, match=f"- {key} .*SQNR .* dB from its range alone"):
        report = odml.export(fn, W, bad, RULES, X).report
    (text,) = report.warnings
    assert text.startswith(key)
    assert text in str(report)
    assert "Ranges to look at" in report.to_html()
    (site,) = [one for one in report.sites if one.place == key]
    assert site.lsb <= site.tolerance
    assert site.range_sqnr < 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert odml.export(fn, W, stats, RULES, X).report.warnings == ()


def test_what_the_program_clips_is_not_warned_of():
    """An output has the range of the clip after it: what lies beyond costs nothing."""

    def fn(w, x):
        return jnp.tanh(jnp.clip(x @ w[0], 0, 0.01) @ w[1])

    stats = odml.qat(fn, RULES).calibrate(W, [(X,)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = odml.export(fn, W, stats, RULES, X).report
    ranges = {one.place: one.range_sqnr for one in report.sites}
    assert ranges["dot_general:0"] is None
    assert ranges["clip:0"] > 30
