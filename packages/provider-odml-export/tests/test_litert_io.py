import jax.numpy as jnp
import numpy as np
import pytest

from jaxtap_testkit.litert_samples import Layer, fake_quant, program
from provider_odml import OdmlError
from provider_odml_export.litert import (
    Runner,
    convert,
    deduplicate,
    integer_io,
    read,
    schema,
    with_outputs,
)

pytestmark = pytest.mark.sample(2)


@pytest.fixture(scope="module")
def layer():
    return Layer.make("FULLY_CONNECTED")


@pytest.fixture(scope="module")
def model(layer):
    x, _ = layer.inputs()
    return convert([program(layer, x, name="one"), program(layer, x[:2], name="two")])


@pytest.mark.slow
def test_inputs_and_outputs_become_integers(model, layer):
    before, after = read(model), read(integer_io(model))
    assert before.op_counts() == {"DEQUANTIZE": 2, "FULLY_CONNECTED": 2, "QUANTIZE": 2}
    assert after.op_counts() == {"FULLY_CONNECTED": 2}
    for name in ("one", "two"):
        old, new = before.signatures[name], after.signatures[name]
        first, last = new.inputs["a0"], new.outputs["o0"]
        assert first.name == old.inputs["a0"].name
        assert last.name == old.outputs["o0"].name
        assert first.shape == old.inputs["a0"].shape
        assert (first.dtype, first.scale, first.zero_point) == ("int8", np.float32(0.02), 3)
        assert (last.dtype, last.scale, last.zero_point) == ("int8", np.float32(0.03), -7)


def test_the_integers_are_those_inside(model, layer):
    x, codes = layer.inputs()
    floats = Runner(model).run("one", a0=x)["o0"]
    integers = Runner(integer_io(model)).run("one", a0=codes)["o0"]
    np.testing.assert_allclose(floats, (integers + 7.0) * np.float32(0.03), rtol=1e-6)


def test_what_is_inside_becomes_an_output_too(model, layer):
    x, _ = layer.inputs()
    inside = read(integer_io(model)).signatures["one"].outputs["o0"].index
    more = with_outputs(model, {"one": {"inside": inside, "again": inside}})
    assert read(more).op_counts() == read(model).op_counts()
    assert list(read(more).signatures["two"].outputs) == ["o0"]
    found = Runner(more).run("one", a0=x)
    np.testing.assert_array_equal(found["o0"], Runner(model).run("one", a0=x)["o0"])
    for name in ("inside", "again"):
        assert found[name].dtype == np.int8
        floats = (found[name] + np.float32(7)) * np.float32(0.03)
        np.testing.assert_allclose(floats, found["o0"], rtol=1e-6)


def test_integer_io_twice_is_once(model):
    once = integer_io(model)
    assert integer_io(once) == once


def test_float_inputs_and_outputs_stay_where_something_reads_them(layer):
    def fn(x, y):
        z = layer(x)
        return z, z.sum(), x * np.float32(2), y

    x, _ = layer.inputs()
    y = np.arange(3, dtype=np.float32)
    found = integer_io(convert([program(fn, x, y)]))
    one = read(found).signatures["main"]
    assert {name: t.dtype for name, t in one.inputs.items()} == {"a0": "float32", "a1": "float32"}
    assert {t.dtype for t in one.outputs.values()} == {"float32"}
    result = Runner(found).run("main", a0=x, a1=y)
    np.testing.assert_array_equal(result["o2"], x * 2)
    np.testing.assert_array_equal(result["o3"], y)
    np.testing.assert_allclose(result["o1"], result["o0"].sum(), rtol=1e-5)


def test_a_program_that_only_quantizes():
    def fn(x):
        return fake_quant(x, 0.5, 1)

    found = integer_io(convert([program(fn, np.float32([-1, 0.6, 200]))]))
    result = Runner(found).run("main", a0=np.int8([-1, 2, 127]))
    # No tensor can be an input and an output: one side stays in float.
    np.testing.assert_array_equal(result["o0"], [-1, 0.5, 63])


@pytest.mark.slow
def test_one_output_twice(layer):
    def fn(x):
        y = layer(x)
        return y, y

    x, codes = layer.inputs()
    found = integer_io(convert([program(fn, x)]))
    first = read(found).signatures["main"].inputs["a0"]
    given = codes if first.dtype == "int8" else x
    result = Runner(found).run("main", a0=given)
    np.testing.assert_array_equal(result["o0"], result["o1"])


@pytest.mark.slow
def test_equal_constants_are_stored_once():
    rows = np.arange(64, dtype=np.float32).reshape(8, 8)

    def fn(x):
        return jnp.sin(x @ jnp.asarray(rows)) + jnp.asarray(rows)

    one = convert([program(fn, rows, name="one"), program(fn, rows[:, ::-1], name="two")])
    found = schema.unpack(one)
    data = [bytes(b.data) for b in found.buffers if b.data is not None and len(b.data)]
    assert len(data) == len(set(data))
    # The second signature's weights again, in a buffer of their own.
    largest = max(range(len(found.buffers)), key=lambda i: _size(found.buffers[i]))
    tensor = next(t for t in found.subgraphs[1].tensors if t.buffer == largest)
    copy = schema.schema().BufferT()
    copy.data = np.array(found.buffers[largest].data)
    found.buffers.append(copy)
    tensor.buffer = len(found.buffers) - 1
    twice = schema.pack(found)
    again = deduplicate(twice)
    assert len(schema.unpack(twice).buffers) == len(schema.unpack(again).buffers) + 1
    for name, x in (("one", rows), ("two", rows[:, ::-1])):
        results = [Runner(m).run(name, a0=x)["o0"] for m in (one, twice, again)]
        np.testing.assert_array_equal(results[0], results[1])
        np.testing.assert_array_equal(results[0], results[2])


def _size(buffer):
    return 0 if buffer.data is None else len(buffer.data)


def test_variables_keep_buffers_of_their_own():
    fb = schema.schema()
    model, graph = fb.ModelT(), fb.SubGraphT()
    graph.tensors, graph.operators, graph.inputs, graph.outputs = [], [], [], []
    model.version, model.operatorCodes, model.subgraphs = 3, [], [graph]
    model.buffers = [fb.BufferT()]
    for number in range(4):
        tensor, buffer = fb.TensorT(), fb.BufferT()
        buffer.data, tensor.isVariable = np.zeros(4, np.uint8), number >= 2
        tensor.shape, tensor.name, tensor.buffer = [4], f"t{number}", number + 1
        tensor.type = fb.TensorType.INT8
        model.buffers.append(buffer)
        graph.tensors.append(tensor)
    found = schema.unpack(deduplicate(schema.pack(model)))
    assert [t.buffer for t in found.subgraphs[0].tensors] == [1, 1, 2, 3]
    assert len(found.buffers) == 4


def test_metadata_is_kept(model):
    before, after = schema.unpack(model), schema.unpack(deduplicate(model))
    kept = [
        [(one.name, bytes(m.buffers[one.buffer].data)) for one in m.metadata or ()]
        for m in (before, after)
    ]
    assert kept[0] == kept[1]
    assert kept[0]


def test_what_is_no_tflite():
    for fn in (integer_io, deduplicate):
        with pytest.raises(OdmlError, match=r"Bytes 4 to 8 of a \.tflite must"):
            fn(b"nothing like it")
