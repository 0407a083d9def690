import ast
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxtap_testkit.litert_samples import Layer, program
from jaxtap_testkit.processes import run_python
from provider_odml import OdmlError
from provider_odml_export.litert import convert, read, schema


@pytest.fixture(scope="module", params=["i8", "i4", "i2"])
def layer(request):
    return Layer.make("FULLY_CONNECTED", weight=request.param)


@pytest.fixture(scope="module")
def model(layer):
    return convert([program(layer, layer.inputs()[0])])


@pytest.mark.slow
def test_signatures(model):
    one = read(model).signatures["main"]
    assert (list(one.inputs), list(one.outputs), one.subgraph) == (["a0"], ["o0"], 0)
    assert (one.inputs["a0"].dtype, one.inputs["a0"].shape) == ("float32", (32, 24))


def test_the_weights_are_of_their_true_type(model, layer):
    found = read(model)
    (graph,) = found.subgraphs
    (dense,) = [op for op in graph.ops if op.name == "FULLY_CONNECTED"]
    weights = graph.tensors[dense.inputs[1]]
    assert weights.dtype == {"i8": "int8", "i4": "int4", "i2": "int2"}[layer.weight]
    assert weights.nbytes == 24 * 16 * int(layer.weight[1:]) // 8
    np.testing.assert_array_equal(weights.data, layer.kernel_codes.T)
    np.testing.assert_array_equal(weights.scale, layer.kernel_scale)
    assert weights.quantized_dimension == 0
    assert not weights.zero_point.any()


def test_activations_and_bias(model, layer):
    (graph,) = read(model).subgraphs
    (dense,) = [op for op in graph.ops if op.name == "FULLY_CONNECTED"]
    first, last = graph.tensors[dense.inputs[0]], graph.tensors[dense.outputs[0]]
    bias = graph.tensors[dense.inputs[2]]
    assert (first.dtype, first.scale.tolist(), first.zero_point.tolist()) == (
        "int8",
        [np.float32(0.02)],
        [3],
    )
    assert (last.zero_point.tolist(), last.quantized_dimension, last.data) == ([-7], None, None)
    step = np.float64(np.float32(0.02)) * layer.kernel_scale
    np.testing.assert_array_equal(bias.data, np.rint(layer.bias / step))


def test_counts(model, layer):
    found = read(model)
    assert found.op_counts() == {"DEQUANTIZE": 1, "FULLY_CONNECTED": 1, "QUANTIZE": 1}
    kind = {"i8": "int8", "i4": "int4", "i2": "int2"}[layer.weight]
    assert found.bytes_by_dtype() == {"int32": 64, kind: 24 * 16 * int(layer.weight[1:]) // 8}
    assert found.float_ops() == []
    assert found.nbytes == len(model)


@pytest.mark.slow
def test_what_computes_in_floats():
    def fn(x):
        return np.float32(2) * x

    found = read(convert([program(fn, np.ones((2, 3), np.float32))]))
    ((graph, op),) = found.float_ops()
    assert (op.name, graph.index, op.fused_activation) == ("MUL", 0, "NONE")


def test_odd_numbers_of_packed_values():
    codes = np.array([[-8, 7, 3], [0, -1, 5]])
    raw = np.array([0x78, 0x03, 0x5F], np.uint8)
    packed = read(_with_constant("INT4", raw, codes.shape)).subgraphs[0].tensors[0]
    np.testing.assert_array_equal(packed.data, codes)
    two = np.array([-2, 1, 0, -1, 1])
    raw = np.array([0b11_00_01_10, 0b01], np.uint8)
    packed = read(_with_constant("INT2", raw, two.shape)).subgraphs[0].tensors[0]
    np.testing.assert_array_equal(packed.data, two)


def test_bytes_that_are_too_few():
    one = read(_with_constant("INT32", np.zeros(8, np.uint8), (3,))).subgraphs[0].tensors[0]
    with pytest.raises(OdmlError, match=r"must be those of int32\[3\], got 8"):
        _ = one.data


def test_scales_in_blocks():
    fb = schema.schema()
    scales = np.arange(1, 5, dtype=np.float16).reshape(2, 2)
    found = schema.unpack(_with_constant("INT4", np.zeros(64, np.uint8), (2, 64)))
    (graph,) = found.subgraphs
    _add_tensor(found, "FLOAT16", scales.view(np.uint8).reshape(-1), scales.shape)
    details = fb.BlockwiseQuantizationT()
    details.scales, details.blockSize, details.zeroPoints = 1, 32, -1
    one = graph.tensors[0].quantization = fb.QuantizationParametersT()
    one.detailsType, one.details = fb.QuantizationDetails.BlockwiseQuantization, details
    weights = read(schema.pack(found)).subgraphs[0].tensors[0]
    assert weights.block_size == 32
    np.testing.assert_array_equal(weights.scale, scales)
    assert weights.scale.dtype == np.float32
    assert weights.zero_point.shape == (2, 2)


def test_buffers_behind_the_flatbuffer():
    found = schema.unpack(_with_constant("INT8", np.zeros(0, np.uint8), (20,)))
    values = np.arange(20, dtype=np.int8)
    body = schema.schema().BufferT()
    # The place is of fixed width, so that the size does not depend on the value.
    body.data, body.offset, body.size = None, 12345, 20
    found.buffers[1] = body
    builder = schema.flatbuffers.Builder(0)
    builder.Finish(found.Pack(builder), file_identifier=b"TFL3")
    body.offset = len(builder.Output())
    builder = schema.flatbuffers.Builder(0)
    builder.Finish(found.Pack(builder), file_identifier=b"TFL3")
    data = bytes(builder.Output()) + values.tobytes()
    np.testing.assert_array_equal(read(data).subgraphs[0].tensors[0].data, values)
    inside = schema.pack(schema.unpack(data))
    np.testing.assert_array_equal(read(inside).subgraphs[0].tensors[0].data, values)


def test_stored_data_is_aligned():
    model = schema.unpack(_with_constant("INT8", np.ones(5, np.uint8), (5,)))
    for size in (1, 3, 17, 40):
        _add_tensor(model, "INT8", np.full(size, size, np.uint8), (size,))
    data = schema.pack(model)
    start = np.frombuffer(data, np.uint8).ctypes.data
    places = [tensor.raw.ctypes.data - start for tensor in read(data).subgraphs[0].tensors]
    assert [place % 16 for place in places] == [0] * 5


@pytest.mark.parametrize("data", [b"", b"short", b"\0\0\0\0ONNXxxxx"])
def test_what_is_no_tflite(data):
    with pytest.raises(OdmlError, match=r"Bytes 4 to 8 of a \.tflite must"):
        read(data)


@pytest.mark.slow
def test_nothing_of_the_extras_is_imported_with_the_package():
    code = (
        "import sys\n"
        "for name in ('litert_converter', 'ai_edge_litert', 'ai_edge_quantizer'):\n"
        "    sys.modules[name] = None\n"
        "import provider_odml_export.litert\n"
        "assert 'jax' not in sys.modules\n"
    )
    run_python("-c", code)


def test_the_chain_imports_no_jax():
    found = set()
    for file in Path(schema.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {one.name.partition(".")[0] for one in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.partition(".")[0])
    assert found - sys.stdlib_module_names == {"flatbuffers", "ml_dtypes", "numpy", "provider_odml"}


def _with_constant(kind, raw, shape):
    fb = schema.schema()
    model, graph = fb.ModelT(), fb.SubGraphT()
    graph.tensors, graph.operators, graph.inputs, graph.outputs = [], [], [], []
    model.version, model.operatorCodes, model.subgraphs = 3, [], [graph]
    model.buffers = [fb.BufferT()]
    _add_tensor(model, kind, raw, shape)
    return schema.pack(model)


def _add_tensor(model, kind, raw, shape):
    fb = schema.schema()
    tensor, buffer = fb.TensorT(), fb.BufferT()
    buffer.data = raw
    model.buffers.append(buffer)
    tensor.shape, tensor.name = list(shape), f"t{len(model.buffers)}"
    tensor.type, tensor.buffer = getattr(fb.TensorType, kind), len(model.buffers) - 1
    model.subgraphs[0].tensors.append(tensor)
