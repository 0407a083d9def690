"""Parameters that a call gives by name are those that it could give by position."""

import functools
import warnings

import jax
import numpy as np
import pytest

from jaxtap_testkit.xla_samples import draw
from provider_xla import (
    PtqProvider,
    QtProvider,
    QuantizationError,
    QuantizationRule,
    QuantizationWarning,
)

INT8 = QuantizationRule(weight_qtype="int8", act_qtype="int8")
W, X = draw((8, 16), (3, 8))
PARAMS = {"w": W}


def dense(params, x):
    return x @ params["w"]


def later(x, params):
    return dense(params, x)


def rounded(x, axis):
    x = np.asarray(x, np.float64)
    scale = np.abs(x).max(axis, keepdims=True) / 127
    return np.round(x / scale) * scale


EXPECTED = rounded(X, 1) @ rounded(W, 0)


def check(y):
    np.testing.assert_allclose(y, EXPECTED, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [PtqProvider, QtProvider])
@pytest.mark.parametrize("fn", [dense, jax.jit(dense)], ids=["plain", "jitted"])
def test_providers_quantize_them(engine, make, fn):
    check(make(INT8).apply(fn)(params=PARAMS, x=X))
    check(jax.jit(make(INT8).apply(fn))(x=X, params=PARAMS))


@pytest.mark.parametrize("make", [PtqProvider, QtProvider])
def test_so_they_do_at_a_later_position(make):
    fn = make(INT8, params_argnum=1).apply(later)
    check(fn(X, params=PARAMS))
    check(fn(params=PARAMS, x=X))


@pytest.mark.parametrize("make", [PtqProvider, QtProvider])
def test_so_they_do_after_arguments_that_a_call_leaves_out(make):
    def fn(x, kind="dense", params=None):
        assert kind == "dense"
        return dense(params, x)

    run = make(INT8, params_argnum=2).apply(fn)
    check(run(X, params=PARAMS))
    check(jax.jit(run)(x=X, params=PARAMS))


def test_plans_run_on_stored_ones_and_warn_about_floats():
    plan = PtqProvider(INT8).plan(dense, PARAMS, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(jax.jit(plan.apply())(params=plan.quantize(PARAMS), x=X))
    with pytest.warns(QuantizationWarning, match="got arrays: 1 weights"):
        check(plan.apply()(params=PARAMS, x=X))


def test_a_function_that_hides_its_names_is_an_error():
    def hidden(*args, **kwargs):
        return dense(*args, **kwargs)

    fn = PtqProvider(INT8).apply(hidden)
    with pytest.raises(QuantizationError, match=r"must be argument 0 .* got 0 by position, and "):
        fn(params=PARAMS, x=X)
    check(fn(PARAMS, x=X))


@pytest.mark.parametrize(
    "fn",
    [
        functools.partial(lambda x, params: dense(params, x), x=X),
        lambda *, params: dense(params, X),
    ],
)
def test_a_function_that_has_no_position_for_them_is_an_error(fn):
    with pytest.raises(QuantizationError, match=r"wrap it in one that has: lambda params, x: "):
        PtqProvider(INT8).apply(fn)(params=PARAMS)
    check(PtqProvider(INT8).apply(lambda params: fn(params=params))(params=PARAMS))


def test_what_a_call_lacks_the_function_says():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'params'"):
        PtqProvider(INT8).apply(dense)(x=X)
