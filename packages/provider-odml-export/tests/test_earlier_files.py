"""A file and statistics that 0.1.0 wrote before 2026-11-28: read, and what today's would be.

``data/program.tflite`` and ``data/program.json`` are what ``export`` and ``QuantStats.save`` wrote
of the program below. They are never written again: another version adds files of its own.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_odml as odml
from provider_odml_export.litert import Runner, read

DATA = Path(__file__).parent / "data"
RULES = [
    odml.OdmlRule(module_path="head", weight_qtype="int4", output_qtype="int8"),
    odml.OdmlRule(weight_qtype="int8", output_qtype="int8"),
]


def inputs():
    """The parameters and the images: a fixed stream of NumPy's."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    params = {"conv": draw(3, 3, 2, 4) / 4, "bias": draw(4), "up": draw(2, 4, 4) / 2}
    params["head"] = draw(64, 3) / 8
    return params, draw(2, 4, 4, 2)


def program(params, x):
    layout = ("NHWC", "HWIO", "NHWC")
    with jax.named_scope("conv"):
        y = jax.lax.conv_general_dilated(
            x, params["conv"], (1, 1), "SAME", dimension_numbers=layout
        )
        y = jax.nn.relu(y + params["bias"])
    y = y.reshape(2, 16, 4)
    y = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w) + c, None), y, params["up"])[0]
    with jax.named_scope("head"):
        return jax.nn.softmax(y.reshape(2, 64) @ params["head"])


def test_a_file_is_what_fake_quantization_computes_from_its_statistics():
    params, x = inputs()
    stats = odml.QuantStats.load(DATA / "program.json")
    trained = odml.qat(program, RULES)(params, x, quant_stats=stats, update_quant_stats=False)
    (found,) = Runner((DATA / "program.tflite").read_bytes()).run("serving_default", x=x).values()
    # A softmax has steps of 1/256. One before it may be on its other side in LiteRT.
    np.testing.assert_allclose(found, trained, rtol=0, atol=2.01 / 256)
    np.testing.assert_allclose(found, program(params, x), rtol=0, atol=0.06)


def test_a_file_says_what_is_in_it():
    model = read((DATA / "program.tflite").read_bytes())
    (one,) = model.signatures.values()
    assert {name: tensor.shape for name, tensor in one.inputs.items()} == {"x": (2, 4, 4, 2)}
    stored = model.bytes_by_dtype()
    assert stored["int4"] == 64 * 3 // 2
    assert stored["int8"] >= 3 * 3 * 2 * 4 + 2 * 4 * 4


@pytest.mark.slow
def test_statistics_export_the_program_again():
    """The ids of their sites are those of today, and the file computes the same."""
    params, x = inputs()
    stats = odml.QuantStats.load(DATA / "program.json")
    before = Runner((DATA / "program.tflite").read_bytes()).run("serving_default", x=x)
    again = odml.export(program, params, stats, RULES, x).run(x=x)
    np.testing.assert_array_equal(again["output_0"], before["output_0"])
