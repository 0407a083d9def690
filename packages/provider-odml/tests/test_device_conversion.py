"""What the device forms become in a .tflite, and what it computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtap_testkit.litert_samples import fake_quant, program
from provider_odml import forms as device
from provider_odml.litert import Runner, convert, read

pytestmark = pytest.mark.sample(2)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 6, 8)).astype(np.float32)
IMAGE = RNG.normal(size=(2, 6, 4, 3)).astype(np.float32)
TABLE = RNG.normal(size=(20, 8)).astype(np.float32)
IDS = np.array([[1, 5, 19], [0, 2, 2]], np.int32)
KERNEL = RNG.normal(size=(3, 3, 3, 5)).astype(np.float32)
NHWC = ("NHWC", "HWIO", "NHWC")
PLAIN = {"QUANTIZE", "DEQUANTIZE"}


def act(x, scale, zero=0, dtype="i8"):
    """A quantized activation: of int16, 256 times as fine and symmetric."""
    return fake_quant(x, scale, zero) if dtype == "i8" else fake_quant(x, scale / 256, 0, dtype)


def inner(dtype):
    """Quantizes values inside of forms."""

    def quantize(x, name, fixed):
        low, high = fixed or (-1.0, 1.0)
        if dtype == "i16":
            return fake_quant(x, 2.0 ** np.ceil(np.log2(max(-low, high))) / 32768, 0, "i16")
        scale = (high - low) / 255
        return fake_quant(x, scale, round(-128 - low / scale))

    return quantize


def run(fn, *args, scale=None):
    """Returns the operations of a function's .tflite, and how far it is from the function."""
    model = convert([program(fn, *args)])
    (graph,) = read(model).subgraphs
    got = Runner(model).run("main", **{f"a{i}": x for i, x in enumerate(args)})["o0"]
    error = np.abs(np.float64(got) - np.float64(jax.jit(fn)(*args))).max()
    return [op.name for op in graph.ops], error / (scale or 1)


def check(expected, fn, *args, scale, tolerance=1, dtype="i8"):
    """The form must become these operations, and be as near as this many steps."""
    kinds, error = run(fn, *args, scale=scale if dtype == "i8" else scale / 256)
    assert [kind for kind in kinds if kind not in PLAIN] == expected
    assert kinds[0] == "QUANTIZE"
    assert error < tolerance + 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("i8", 1), ("i16", 3)])
def test_softmax_at_any_scale(dtype, tolerance):
    def fn(x):
        y = device.softmax(act(x, 0.03, 3, dtype), fake_quant=inner(dtype))
        return act(y, 0.003, -128, dtype)

    check(["SOFTMAX"], fn, X, scale=0.003, tolerance=tolerance, dtype=dtype)


def test_softmax_over_another_axis():
    def fn(x):
        return act(device.softmax(act(x, 0.03, 3), 1, fake_quant=inner("i8")), 0.003, -128)

    check(["TRANSPOSE", "SOFTMAX", "TRANSPOSE"], fn, X, scale=0.003)


@pytest.mark.slow
def test_log_softmax():
    def fn(x):
        return act(device.log_softmax(act(x, 0.03, 3), fake_quant=inner("i8")), 0.04, 127)

    check(["LOG_SOFTMAX"], fn, X, scale=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("approximate", [True, False])
def test_gelu(approximate):
    check(["GELU"], lambda x: act(device.gelu(act(x, 0.03, 3), approximate), 0.03, 3), X,
          scale=0.03)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["i8", "i16"])
def test_neg(dtype):
    def fn(x):
        return act(device.neg(act(x, 0.03, 3, dtype), fake_quant=inner(dtype)), 0.03, -3, dtype)

    check(["SUB"], fn, X, scale=0.03, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["i8", "i16"])
def test_div_by_a_constant(dtype):
    def fn(x):
        y = device.div(act(x, 0.03, 3, dtype), np.float32(3), fake_quant=inner(dtype))
        return act(y, 0.02, 1, dtype)

    check(["MUL"], fn, X, scale=0.02, dtype=dtype)


@pytest.mark.slow
def test_div_of_quotients_near_zero():
    x = np.float32([[-0.3, -0.03, 0, 0.03, 0.3]])

    def fn(x, y):
        return act(device.div(act(x, 0.03), act(y, 0.02)), 0.2)

    check(["DIV"], fn, x, np.ones_like(x), scale=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["i8", "i16"])
@pytest.mark.parametrize("size", [(12, 8), (9, 5), (3, 2)])
def test_resize_nearest(size, dtype):
    def fn(x):
        y = device.resize(act(x, 0.03, 3, dtype), (2, *size, 3), "nearest")
        return act(y, 0.03, 3, dtype)

    check(["RESIZE_NEAREST_NEIGHBOR"], fn, IMAGE, scale=0.03, tolerance=0, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "antialias"), [((12, 8), True), ((9, 5), True), ((3, 2), False)])
def test_resize_bilinear(size, antialias):
    def fn(x):
        return act(device.resize(act(x, 0.03, 3), (2, *size, 3), "bilinear", antialias), 0.03, 3)

    check(["RESIZE_BILINEAR"], fn, IMAGE, scale=0.03)


@pytest.mark.slow
def test_resize_with_antialiasing_is_float():
    def fn(x):
        return act(device.resize(act(x, 0.03, 3), (2, 3, 2, 3), "bilinear"), 0.03, 3)

    kinds, error = run(fn, IMAGE, scale=0.03)
    assert "RESIZE_BILINEAR" not in kinds
    assert error < 1.1


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["i8", "i4"])
def test_rows_of_a_table_with_a_scale_each(weight):
    scale = np.abs(TABLE).max(1) / (127 if weight == "i8" else 7)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )

    def fn(ids):
        table = fake_quant(jnp.asarray(TABLE), scale, None, weight, True, 0)
        return act(device.gather(table, ids[..., None], numbers, (1, 8)), 0.03, 3)

    kinds, error = run(fn, IDS, scale=0.03)
    assert [kind for kind in kinds if kind not in {*PLAIN, "RESHAPE"}] == ["EMBEDDING_LOOKUP"]
    assert error < 1.1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["i8", "i16"])
@pytest.mark.parametrize(
    ("padding", "count", "ops"),
    [
        ("VALID", True, ["AVERAGE_POOL_2D"]),
        ("SAME", False, ["AVERAGE_POOL_2D"]),
        ("SAME", True, ["PAD", "AVERAGE_POOL_2D"]),
        (((1, 1), (1, 1)), True, ["PAD", "AVERAGE_POOL_2D"]),
    ],
)
def test_avg_pool(padding, count, ops, dtype):
    def fn(x):
        y = device.avg_pool(act(x, 0.03, 3, dtype), (3, 3), (2, 2), padding, count)
        return act(y, 0.03, 3, dtype)

    check(ops, fn, IMAGE, scale=0.03, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("avg", "AVERAGE"), ("max", "MAX")])
@pytest.mark.parametrize("dtype", ["i8", "i16"])
def test_pools_along_one_axis(name, kind, dtype):
    def fn(x):
        y = getattr(device, f"{name}_pool")(act(x, 0.03, 3, dtype), (2,), (2,))
        return act(y, 0.03, 3, dtype)

    check(["RESHAPE", f"{kind}_POOL_2D", "RESHAPE"], fn, X, scale=0.03, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["i8", "i16"])
@pytest.mark.parametrize("padding", [((1, 2), (1, 2)), ((2, 2), (2, 2))])
def test_transposed_convolution(padding, dtype):
    scale = np.abs(KERNEL).max((0, 1, 2)) / 127

    def fn(x):
        kernel = fake_quant(jnp.asarray(KERNEL), scale, None, "i8", True, 3)
        y = device.conv_general_dilated(
            act(x, 0.03, 3, dtype), kernel, (1, 1), padding, (2, 2), None, NHWC
        )
        return act(jax.nn.relu(y + jnp.linspace(0.5, 1, 5)), 0.05, -128, dtype)

    kinds, error = run(fn, IMAGE, scale=0.05 if dtype == "i8" else 0.05 / 256)
    moving = {"RESHAPE", "PAD", "SLICE", "STRIDED_SLICE"}
    assert [kind for kind in kinds if kind not in {*PLAIN, *moving}] == ["CONV_2D"]
    assert kinds.count("DEQUANTIZE") == 1
    assert error < 1.1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["i8", "i16"])
@pytest.mark.parametrize(
    "fn", [jax.nn.relu6, jax.nn.elu, jax.nn.log_softmax, lambda x: jnp.where(x > 0, x, -1e9)]
)
def test_islands(fn, dtype):
    def walled(x):
        return act(device.island(fn)(act(x, 0.03, 3, dtype)), 0.02, 1, dtype)

    kinds, error = run(walled, X, scale=0.02 if dtype == "i8" else 0.02 / 256)
    assert kinds[:2] == ["QUANTIZE", "DEQUANTIZE"]
    assert kinds[-2:] == ["QUANTIZE", "DEQUANTIZE"]
    assert not {*kinds[2:-2]} & PLAIN
    assert error < 1.1


@pytest.mark.slow
def test_a_wall_between_8_and_16_bits():
    weight = RNG.normal(size=(8, 8)).astype(np.float32)

    def fn(x):
        w = fake_quant(jnp.asarray(weight), np.abs(weight).max(0) / 127, None, "i8", True, 1)
        y = device.wall(act(act(x, 0.03, 3) @ w, 0.04, 1))
        return fake_quant(jnp.abs(fake_quant(y, 2e-4, 0, "i16")), 2e-4, 0, "i16")

    kinds, error = run(fn, X, scale=2e-4)
    assert kinds == ["QUANTIZE", "FULLY_CONNECTED", "DEQUANTIZE", "QUANTIZE", "ABS", "DEQUANTIZE"]
    assert error < 0.04 / 2e-4 * 1.1


@pytest.mark.slow
def test_a_wall_keeps_another_consumer_integer():
    def fn(x):
        y = act(act(x, 0.03, 3) + act(x, 0.03, 3), 0.06, 1)
        return act(y * y, 0.1, -128) + jnp.mean(device.wall(y) * 2, keepdims=True)

    kinds, _ = run(fn, X)
    model = read(convert([program(fn, X)]))
    (graph,) = model.subgraphs
    integer = [op.name for op in graph.ops if graph.tensors[op.outputs[0]].dtype == "int8"]
    assert [kind for kind in integer if kind != "QUANTIZE"] == ["ADD", "MUL"]
    assert "MEAN" in kinds


@pytest.mark.slow
@pytest.mark.parametrize("is_constant", [True, False])
def test_products_with_axes_in_another_order(is_constant):
    weight = RNG.normal(size=(5, 8, 6)).astype(np.float32)
    numbers = (((1, 2), (2, 1)), ((), ()))

    def fn(x, *weights):
        w = jnp.asarray(weight) if is_constant else weights[0]
        return act(device.dot_general(act(x, 0.03, 3), act(w, 0.02), numbers), 0.2)

    kinds, error = run(fn, X, *([] if is_constant else [weight]), scale=0.2)
    assert {"FULLY_CONNECTED", "BATCH_MATMUL"} & set(kinds)
    assert error < 1.1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["i8", "i16"])
def test_a_bias_of_one_value(dtype):
    weight = RNG.normal(size=(8, 16)).astype(np.float32)
    bias = device.unsplat(np.ones(16, np.float32))

    def fn(x):
        w = fake_quant(jnp.asarray(weight), np.abs(weight).max(0) / 127, None, "i8", True, 1)
        return act(act(x, 0.03, 3, dtype) @ w + bias, 0.06, 0, dtype)

    check(["FULLY_CONNECTED"], fn, X[0], scale=0.06, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["bias", "weight", "order"])
def test_the_converter_still_has_these_faults(what):
    """What `unsplat` and `dot_general` are for; where this fails, they are not needed anymore."""
    weight = RNG.normal(size=(8, 16)).astype(np.float32)
    other = RNG.normal(size=(5, 8, 6)).astype(np.float32)
    bias = np.ones(16, np.float32) if what == "bias" else np.zeros(16, np.float32)
    if what == "weight":
        weight = np.ones_like(weight)

    def fn(x):
        x = act(x, 0.03, 3)
        if what == "order":
            return act(jnp.einsum("bti,oit->bo", x, act(jnp.asarray(other), 0.02)), 0.2)
        w = fake_quant(jnp.asarray(weight), np.linspace(0.01, 0.03, 16), None, "i8", True, 1)
        return act(x @ w + bias, 0.06)

    _, error = run(fn, X, scale=0.06)
    assert error > 4
