"""Arguments of the wrong kind are one error, which says what is allowed."""

import jax.numpy as jnp
import numpy as np
import pytest

import provider_odml as odml

PARAMS, X = np.eye(4, dtype=np.float32), jnp.ones((2, 4))
RULE = odml.OdmlRule(weight_qtype="int8", output_qtype="int8")


def model(params, x):
    return x @ params


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: odml.qat(model, RULE)(PARAMS, X, quant_stats={}),
            "quant_stats must be None or QuantStats, got a dict",
        ),
        (
            lambda: odml.qat(model, RULE).with_state({}, X, PARAMS, X),
            "stats must be None or QuantStats, got a dict",
        ),
        (
            lambda: odml.qat(model, RULE).with_state(None, X, PARAMS, X),
            "stats must be what init or calibrate returned, got None",
        ),
        (
            lambda: odml.qat(model, RULE).calibrate(PARAMS, X),
            "Each of batches must be a tuple of the arguments after the parameters, got a ",
        ),
        (
            lambda: odml.qat(model, RULE).calibrate(PARAMS, 3),
            "batches must be an iterable of tuples, got 3",
        ),
    ],
)
def test_wrong_kinds(call, message):
    with pytest.raises(odml.OdmlError, match=message):
        call()


@pytest.mark.parametrize("rules", [None, "int8", [None]])
def test_rules_of_the_wrong_kind(rules):
    with pytest.raises(TypeError, match="rules must be OdmlRule objects, got"):
        odml.qat(model, rules)
