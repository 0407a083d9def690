"""Arguments of export of the wrong kind are one error, which says what is allowed."""

import jax.numpy as jnp
import numpy as np
import pytest

import provider_odml as odml

PARAMS, X = np.eye(4, dtype=np.float32), jnp.ones((2, 4))
RULE = odml.OdmlRule(weight_qtype="int8", output_qtype="int8")


def model(params, x):
    return x @ params


def export(*args, **options):
    return lambda: odml.export(*args, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (export(model, PARAMS, {}, RULE, X), "stats must be None or QuantStats, got a dict"),
        (export(model, PARAMS, X, RULE, X), "stats must be None or QuantStats, got a "),
        (export("model", PARAMS, None, RULE, X), "fn must be a function .*, got a str"),
        (
            export(model, PARAMS, None, RULE, X, backend={}),
            "backend must be 'converter', the name of an export backend or an ExportBackend, got {}"
            ". Install a plugin",
        ),
        (
            export(model, PARAMS, None, RULE, signatures={"one": X}),
            "Signature 'one' must be a Signature or a tuple of arguments, got a ",
        ),
        (
            lambda: odml.OdmlConversionProvider(RULE, PARAMS, {}),
            "quant_stats must be None or QuantStats, got a dict",
        ),
    ],
)
def test_wrong_kinds(call, message):
    with pytest.raises(odml.OdmlError, match=message):
        call()
