"""export_model: methods of quantized model objects, for processes that have no model."""

import numpy as np
import pytest

import provider_xla as xla
from jaxtap_testkit.bridge_nets import TOKENS, equinox_net, linen_net, nnx_net
from jaxtap_testkit.processes import run_python

SERVER = """
import sys
import numpy as np, provider_xla as xla
folder = sys.argv[1]
for name in sys.argv[2:]:
    program = xla.load_exported(f"{folder}/{name}")
    stored = program.parameters(xla.load(f"{folder}/{name}.safetensors"))
    known = np.load(f"{folder}/{name}.npz")
    np.testing.assert_allclose(program(stored, known["x"]), known["y"], atol=1e-5)
    inside = xla.load_exported(f"{folder}/{name}-inside")
    np.testing.assert_allclose(inside(known["x"]), known["y"], atol=1e-5)
    frameworks = {"flax", "equinox"}.intersection(sys.modules)
    print(name, len(stored), frameworks or "no framework")
"""


def models():
    net, variables = linen_net()
    return {
        "nnx": (nnx_net(), TOKENS),
        "linen": (net.bind(variables), TOKENS),
        "equinox": (equinox_net(), TOKENS[0]),
    }


def quantized(model, x, **fields):
    path = ".*(up|down|mlp).*"
    rule = xla.QuantizationRule(module_path=path, weight_qtype="int8", weights_only=True, **fields)
    return xla.quantize_model(model, xla.PtqProvider(rule), x)


@pytest.mark.slow
def test_fresh_processes_serve_models(tmp_path):
    for name, (model, x) in models().items():
        made = quantized(model, x)
        stored = xla.model_parameters(made)
        xla.save(tmp_path / f"{name}.safetensors", stored)
        xla.export_model(made, x).save(tmp_path / name)
        xla.export_model(made, x, inside=True).save(tmp_path / f"{name}-inside")
        y = np.asarray(made(x))
        assert np.abs(y - model(x)).max() > 1e-5
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
    printed = run_python("-c", SERVER, tmp_path, *models()).stdout.splitlines()
    assert [line.split(" ", 2)[2] for line in printed] == ["no framework"] * 3


def test_any_batch_and_other_parameters():
    model, x = models()["nnx"]
    made = quantized(model, x)
    program = xla.load_exported(xla.export_model(made, x, shapes="b, ...").serialize())
    stored = xla.model_parameters(made)
    np.testing.assert_allclose(program(stored, x[:1]), made(x[:1]), atol=1e-5)
    other = dict(stored, **{"head/kernel": stored["blocks/0/up/kernel"]})
    with pytest.raises(xla.StoreError, match=r"head/kernel.*must be a array of float32"):
        program.parameters(other)
    del other["head/kernel"]
    with pytest.raises(xla.StoreError, match="must be a tree like that of the program"):
        program.parameters(other)


def test_what_is_no_program():
    model, x = models()["nnx"]
    with pytest.raises(xla.QuantizationError, match=r"not quantized\. Pass what quantize_model"):
        xla.export_model(model, x)
    net, _ = linen_net()
    unbound = xla.quantize_model(net, xla.PtqProvider(xla.QuantizationRule(weight_qtype="int8")))
    with pytest.raises(xla.QuantizationError, match="must hold its variables to be exported"):
        xla.model_parameters(unbound)
