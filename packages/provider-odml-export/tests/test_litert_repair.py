import json

import numpy as np
import pytest

from jaxtap_testkit.litert_samples import Layer, program
from jaxtap_testkit.processes import run_python
from provider_odml import OdmlError
from provider_odml_export.litert import Runner, convert, converter, integer_io, read, repair, schema

KINDS = ["FULLY_CONNECTED", "CONV_2D", "DEPTHWISE_CONV_2D"]


@pytest.fixture(scope="module", params=KINDS)
def layer(request):
    return Layer.make(request.param, act="i16")


@pytest.fixture(scope="module")
def unrepaired(layer):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(converter, "repair", lambda model: model)
        return convert([program(layer, layer.inputs()[0])])


def _bias(model, kind):
    (graph,) = read(model).subgraphs
    (op,) = [op for op in graph.ops if op.name == kind]
    return graph.tensors[op.inputs[2]]


@pytest.mark.slow
@pytest.mark.parametrize("reference", [False, True])
def test_int16_activations_compute_what_they_should(layer, unrepaired, reference):
    _, codes = layer.inputs()
    model = integer_io(repair(unrepaired))
    found = Runner(model, reference_kernels=reference).run("main", a0=codes)["o0"]
    assert found.dtype == np.int16
    difference = np.abs(found - layer.exact(codes))
    # The convolutions scale sums by 16 bits of the multiplier.
    assert difference.max() <= (0 if layer.kind == "FULLY_CONNECTED" else 1)


def test_the_bias_is_widened(layer, unrepaired):
    old, new = _bias(unrepaired, layer.kind), _bias(repair(unrepaired), layer.kind)
    assert (old.dtype, new.dtype) == ("int32", "int64")
    np.testing.assert_array_equal(old.data, new.data)
    np.testing.assert_array_equal(old.scale, new.scale)
    assert repair(repair(unrepaired)) == repair(unrepaired)


@pytest.mark.slow
def test_converting_repairs(layer, unrepaired):
    model = convert([program(layer, layer.inputs()[0])])
    assert _bias(model, layer.kind).dtype == "int64"


@pytest.mark.slow
def test_8_bit_activations_are_left_alone():
    layer = Layer.make("CONV_2D")
    model = convert([program(layer, layer.inputs()[0])])
    assert repair(model) == model
    assert _bias(model, "CONV_2D").dtype == "int32"


def test_a_bias_that_an_8_bit_operation_reads_too(layer, unrepaired):
    model = schema.unpack(unrepaired)
    (graph,) = model.subgraphs
    code = [one.builtinCode for one in model.operatorCodes].index(
        getattr(schema.schema().BuiltinOperator, layer.kind)
    )
    one = next(op for op in graph.operators if op.opcodeIndex == code)
    # A second operation whose output is 8-bit, reading the same bias.
    other = schema.unpack(unrepaired).subgraphs[0].operators[graph.operators.index(one)]
    out = schema.unpack(unrepaired).subgraphs[0].tensors[int(one.outputs[0])]
    out.type = schema.schema().TensorType.INT8
    graph.tensors.append(out)
    other.outputs = np.array([len(graph.tensors) - 1], np.int32)
    graph.operators.append(other)
    found = read(repair(schema.pack(model))).subgraphs[0]
    both = [op for op in found.ops if op.name == layer.kind]
    assert [found.tensors[op.inputs[2]].dtype for op in both] == ["int64", "int32"]


@pytest.mark.slow
def test_what_is_no_tflite():
    with pytest.raises(OdmlError, match=r"Bytes 4 to 8 of a \.tflite must"):
        repair(b"nothing like it")


@pytest.mark.slow
def test_the_fault_is_still_there(layer, unrepaired, tmp_path):
    """If this fails, the converter was put right, and the repair can go.

    In a process of its own: the kernels read past the bias.
    """
    file, codes = tmp_path / "m.tflite", tmp_path / "x.npy"
    file.write_bytes(integer_io(unrepaired))
    np.save(codes, layer.inputs()[1])
    code = (
        "import json, sys, numpy as np\n"
        "from provider_odml_export.litert import Runner\n"
        "try:\n"
        "    m = Runner(open(sys.argv[1], 'rb').read(), reference_kernels=True)\n"
        "    print(json.dumps(m.run('main', a0=np.load(sys.argv[2]))['o0'].tolist()))\n"
        "except Exception as error:\n"
        "    print(json.dumps(str(error)))\n"
    )
    done = run_python("-c", code, file, codes, strict=False, check=False)
    if done.returncode >= 0:
        found = json.loads(done.stdout)
        if isinstance(found, str):
            assert "INT32 != INT64" in found
        else:
            assert np.abs(np.array(found) - layer.exact(layer.inputs()[1])).max() > 1
