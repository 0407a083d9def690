import numpy as np
import pytest

from jaxtap_testkit.litert_samples import Layer, program
from provider_odml import OdmlError
from provider_odml_export.litert import Runner, convert, integer_io, schema

KINDS = ["FULLY_CONNECTED", "CONV_2D", "DEPTHWISE_CONV_2D"]


@pytest.fixture(scope="module", params=KINDS)
def layer(request):
    return Layer.make(request.param)


@pytest.fixture(scope="module")
def model(layer):
    return integer_io(convert([program(layer, layer.inputs()[0])]))


@pytest.fixture(scope="module")
def dense():
    layer = Layer.make("FULLY_CONNECTED")
    return integer_io(convert([program(layer, layer.inputs()[0])]))


@pytest.mark.slow
def test_the_default_kernels_round_exactly(layer, model):
    _, codes = layer.inputs()
    found = Runner(model).run("main", a0=codes)["o0"]
    assert found.dtype == np.int8
    np.testing.assert_array_equal(found, layer.exact(codes))


def test_the_reference_kernels_are_within_one(layer, model):
    _, codes = layer.inputs()
    found = Runner(model, reference_kernels=True).run("main", a0=codes)["o0"]
    difference = np.abs(found - layer.exact(codes))
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.02


@pytest.mark.slow
def test_inputs_of_any_strides(dense):
    layer = Layer.make("FULLY_CONNECTED")
    _, codes = layer.inputs()
    turned = np.asfortranarray(codes)
    assert not turned.flags.c_contiguous
    found = Runner(dense).run("main", a0=turned)["o0"]
    np.testing.assert_array_equal(found, layer.exact(codes))


def test_outputs_outlive_the_next_run(dense):
    layer = Layer.make("FULLY_CONNECTED")
    _, codes = layer.inputs()
    runner = Runner(dense, threads=2)
    first = runner.run("main", a0=codes)["o0"]
    runner.run("main", a0=np.zeros_like(codes))
    np.testing.assert_array_equal(first, layer.exact(codes))


def test_tensors_between(dense):
    layer = Layer.make("FULLY_CONNECTED")
    _, codes = layer.inputs()
    runner = Runner(dense, preserve_all_tensors=True)
    with pytest.raises(OdmlError, match="after a run"):
        runner.tensor(0)
    out = runner.run("main", a0=codes)["o0"]
    details = runner.details("main")
    np.testing.assert_array_equal(runner.tensor(details.inputs["a0"].index), codes)
    np.testing.assert_array_equal(runner.tensor(details.outputs["o0"].index), out)
    with pytest.raises(OdmlError, match="Tensor 999"):
        runner.tensor(999)
    plain = Runner(dense)
    plain.run("main", a0=codes)
    with pytest.raises(OdmlError, match="preserve_all_tensors"):
        plain.tensor(0)


def test_inputs_that_do_not_fit(dense):
    runner = Runner(dense)
    with pytest.raises(OdmlError) as error:
        runner.run("main", a0=np.zeros((2, 24), np.float32))
    assert str(error.value) == (
        "Inputs of signature 'main': 'a0' must be int8[32, 24], got float32[2, 24]."
    )
    with pytest.raises(OdmlError, match=r"\['a0'\] are missing; \['b'\] are unknown"):
        runner.run("main", b=np.zeros(3))
    with pytest.raises(OdmlError, match=r"signature must be one of 'main', got 'other'"):
        runner.run("other")


@pytest.mark.slow
def test_an_input_may_be_called_signature_or_self():
    def fn(x):
        return x + x

    one = program(fn, np.ones(2, np.float32))
    model = convert([type(one)("main", one.artifact, ("signature",), ("self",))])
    found = Runner(model).run("main", signature=np.ones(2, np.float32))
    np.testing.assert_array_equal(found["self"], [2, 2])


@pytest.mark.slow
def test_scalars():
    def fn(x):
        return x * x

    model = convert([program(fn, np.float32(3))])
    found = Runner(model).run("main", a0=np.float32(3))["o0"]
    assert (found.shape, found) == ((), 9)


def test_a_model_that_litert_can_not_run(dense):
    model = schema.unpack(dense)
    (op,) = model.subgraphs[0].operators
    code = model.operatorCodes[op.opcodeIndex]
    code.builtinCode = code.deprecatedBuiltinCode = schema.schema().BuiltinOperator.CUSTOM
    code.customCode = "Nobody's"
    op.builtinOptions, op.builtinOptionsType = None, 0
    with pytest.raises(OdmlError, match=r"LiteRT can't .*Nobody's"):
        Runner(schema.pack(model)).run("main", a0=Layer.make("FULLY_CONNECTED").inputs()[1])


def test_a_broken_model(dense):
    broken = bytearray(dense)
    at = len(dense) // 3
    broken[at : at + 256] = b"\xff" * 256
    with pytest.raises(OdmlError, match="broken"):
        Runner(bytes(broken))
