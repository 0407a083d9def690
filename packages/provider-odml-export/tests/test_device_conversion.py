"""What the device forms become in a .tflite, and what it computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtap_testkit.litert_samples import fake_quant, program
from provider_odml_export import forms as device
from provider_odml_export.litert import Runner, convert, read

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


def run_all(cases):
    """Return the operations of each function's .tflite, and how far it is from the function.

    Args:
        cases: by name, a function, its arguments, and the unit of the distance. All are converted
            together, which takes little longer than one.
    """
    programs = [program(fn, *args, name=f"s{i}") for i, (fn, args, _) in enumerate(cases.values())]
    file = convert(programs)
    model, runner, found = read(file), Runner(file), {}
    for i, (name, (fn, args, unit)) in enumerate(cases.items()):
        graph = model.subgraphs[model.signatures[f"s{i}"].subgraph]
        got = runner.run(f"s{i}", **{f"a{i}": x for i, x in enumerate(args)})["o0"]
        error = np.abs(np.float64(got) - np.float64(jax.jit(fn)(*args))).max()
        found[name] = [op.name for op in graph.ops], error / unit
    return found


def run(fn, *args, scale=1.0):
    """Return the operations of one function's .tflite, and how far it is from the function."""
    return run_all({"main": (fn, args, scale)})["main"]


def in_types(make, *args, scale):
    """Return cases for ``run_all``: a function that ``make(dtype)`` returns, by dtype."""
    return {
        dtype: (make(dtype), args, scale if dtype == "i8" else scale / 256)
        for dtype in ("i8", "i16")
    }


def check(expected, cases, tolerance=1):
    """The forms must become these operations, and be as near as this many steps."""
    for name, (kinds, error) in run_all(cases).items():
        assert [kind for kind in kinds if kind not in PLAIN] == expected, name
        assert kinds[0] == "QUANTIZE", name
        assert error < (tolerance[name] if isinstance(tolerance, dict) else tolerance) + 0.1, name


@pytest.mark.slow
def test_softmax_at_any_scale():
    def make(dtype):
        return lambda x: act(
            device.softmax(act(x, 0.03, 3, dtype), fake_quant=inner(dtype)), 0.003, -128, dtype
        )

    check(["SOFTMAX"], in_types(make, X, scale=0.003), tolerance={"i8": 1, "i16": 3})


def test_softmax_over_another_axis():
    def fn(x):
        return act(device.softmax(act(x, 0.03, 3), 1, fake_quant=inner("i8")), 0.003, -128)

    check(["TRANSPOSE", "SOFTMAX", "TRANSPOSE"], {"main": (fn, (X,), 0.003)})


@pytest.mark.slow
def test_log_softmax():
    def fn(x):
        return act(device.log_softmax(act(x, 0.03, 3), fake_quant=inner("i8")), 0.04, 127)

    check(["LOG_SOFTMAX"], {"main": (fn, (X,), 0.04)})


@pytest.mark.slow
def test_gelu():
    def make(approximate):
        return lambda x: act(device.gelu(act(x, 0.03, 3), approximate), 0.03, 3)

    check(["GELU"], {str(each): (make(each), (X,), 0.03) for each in (True, False)})


@pytest.mark.slow
def test_neg():
    def make(dtype):
        return lambda x: act(
            device.neg(act(x, 0.03, 3, dtype), fake_quant=inner(dtype)), 0.03, -3, dtype
        )

    check(["SUB"], in_types(make, X, scale=0.03))


@pytest.mark.slow
def test_div_by_a_constant():
    def make(dtype):
        three, quantize = np.float32(3), inner(dtype)
        return lambda x: act(
            device.div(act(x, 0.03, 3, dtype), three, fake_quant=quantize), 0.02, 1, dtype
        )

    check(["MUL"], in_types(make, X, scale=0.02))


@pytest.mark.slow
def test_div_of_quotients_near_zero():
    x = np.float32([[-0.3, -0.03, 0, 0.03, 0.3]])

    def fn(x, y):
        return act(device.div(act(x, 0.03), act(y, 0.02)), 0.2)

    check(["DIV"], {"main": (fn, (x, np.ones_like(x)), 0.2)})


@pytest.mark.slow
def test_resize_nearest():
    def make(dtype, size):
        return lambda x: act(
            device.resize(act(x, 0.03, 3, dtype), (2, *size, 3), "nearest"), 0.03, 3, dtype
        )

    cases = {}
    for size in ((12, 8), (9, 5), (3, 2)):
        for dtype, case in in_types(lambda d, size=size: make(d, size), IMAGE, scale=0.03).items():
            cases[f"{size} {dtype}"] = case
    check(["RESIZE_NEAREST_NEIGHBOR"], cases, tolerance=0)


@pytest.mark.slow
def test_resize_bilinear():
    def make(size, antialias):
        return lambda x: act(
            device.resize(act(x, 0.03, 3), (2, *size, 3), "bilinear", antialias), 0.03, 3
        )

    sizes = {(12, 8): True, (9, 5): True, (3, 2): False}
    cases = {str(one): (make(one, antialias), (IMAGE,), 0.03) for one, antialias in sizes.items()}
    check(["RESIZE_BILINEAR"], cases)


@pytest.mark.slow
def test_resize_with_antialiasing_is_float():
    def fn(x):
        return act(device.resize(act(x, 0.03, 3), (2, 3, 2, 3), "bilinear"), 0.03, 3)

    kinds, error = run(fn, IMAGE, scale=0.03)
    assert "RESIZE_BILINEAR" not in kinds
    assert error < 1.1


@pytest.mark.slow
def test_rows_of_a_table_with_a_scale_each():
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )

    def make(weight, largest):
        def fn(ids):
            scale = np.abs(TABLE).max(1) / largest
            table = fake_quant(jnp.asarray(TABLE), scale, None, weight, True, 0)
            return act(device.gather(table, ids[..., None], numbers, (1, 8)), 0.03, 3)

        return fn

    cases = {name: (make(name, most), (IDS,), 0.03) for name, most in (("i8", 127), ("i4", 7))}
    for name, (kinds, error) in run_all(cases).items():
        kinds = [kind for kind in kinds if kind not in {*PLAIN, "RESHAPE"}]
        assert kinds == ["EMBEDDING_LOOKUP"], name
        assert error < 1.1, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("padding", "count"),
    [("VALID", True), ("SAME", False), ("SAME", True), (((1, 1), (1, 1)), True)],
)
def test_avg_pool(padding, count):
    def make(dtype):
        return lambda x: act(
            device.avg_pool(act(x, 0.03, 3, dtype), (3, 3), (2, 2), padding, count), 0.03, 3, dtype
        )

    pads = ["PAD"] if padding != "VALID" and count else []
    check([*pads, "AVERAGE_POOL_2D"], in_types(make, IMAGE, scale=0.03))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("avg", "AVERAGE"), ("max", "MAX")])
def test_pools_along_one_axis(name, kind):
    def make(dtype):
        pool = getattr(device, f"{name}_pool")
        return lambda x: act(pool(act(x, 0.03, 3, dtype), (2,), (2,)), 0.03, 3, dtype)

    check(["RESHAPE", f"{kind}_POOL_2D", "RESHAPE"], in_types(make, X, scale=0.03))


@pytest.mark.slow
def test_transposed_convolution():
    scale = np.abs(KERNEL).max((0, 1, 2)) / 127

    def make(dtype, padding):
        def fn(x):
            kernel = fake_quant(jnp.asarray(KERNEL), scale, None, "i8", True, 3)
            y = device.conv_general_dilated(
                act(x, 0.03, 3, dtype), kernel, (1, 1), padding, (2, 2), None, NHWC
            )
            return act(jax.nn.relu(y + jnp.linspace(0.5, 1, 5)), 0.05, -128, dtype)

        return fn

    cases = {}
    for padding in (((1, 2), (1, 2)), ((2, 2), (2, 2))):
        found = in_types(lambda d, padding=padding: make(d, padding), IMAGE, scale=0.05)
        cases |= {f"{dtype} {padding}": case for dtype, case in found.items()}
    moving = {"RESHAPE", "PAD", "SLICE", "STRIDED_SLICE"}
    for name, (kinds, error) in run_all(cases).items():
        assert [kind for kind in kinds if kind not in {*PLAIN, *moving}] == ["CONV_2D"], name
        assert kinds.count("DEQUANTIZE") == 1, name
        assert error < 1.1, name


@pytest.mark.slow
def test_islands():
    inside = {
        "relu6": jax.nn.relu6,
        "elu": jax.nn.elu,
        "log_softmax": jax.nn.log_softmax,
        "where": lambda x: jnp.where(x > 0, x, -1e9),
    }

    def make(dtype, fn):
        return lambda x: act(device.island(fn)(act(x, 0.03, 3, dtype)), 0.02, 1, dtype)

    cases = {}
    for name, fn in inside.items():
        found = in_types(lambda d, fn=fn: make(d, fn), X, scale=0.02)
        cases |= {f"{name} {dtype}": case for dtype, case in found.items()}
    for name, (kinds, error) in run_all(cases).items():
        assert kinds[:2] == ["QUANTIZE", "DEQUANTIZE"], name
        assert kinds[-2:] == ["QUANTIZE", "DEQUANTIZE"], name
        assert not {*kinds[2:-2]} & PLAIN, name
        assert error < 1.1, name


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

    model = read(convert([program(fn, X)]))
    (graph,) = model.subgraphs
    integer = [op.name for op in graph.ops if graph.tensors[op.outputs[0]].dtype == "int8"]
    assert [kind for kind in integer if kind != "QUANTIZE"] == ["ADD", "MUL"]
    assert "MEAN" in [op.name for op in graph.ops]


@pytest.mark.slow
def test_products_with_axes_in_another_order():
    weight = RNG.normal(size=(5, 8, 6)).astype(np.float32)
    numbers = (((1, 2), (2, 1)), ((), ()))

    def fn(x, *weights):
        w = weights[0] if weights else jnp.asarray(weight)
        return act(device.dot_general(act(x, 0.03, 3), act(w, 0.02), numbers), 0.2)

    cases = {"constant": (fn, (X,), 0.2), "argument": (fn, (X, weight), 0.2)}
    for name, (kinds, error) in run_all(cases).items():
        assert {"FULLY_CONNECTED", "BATCH_MATMUL"} & set(kinds), name
        assert error < 1.1, name


@pytest.mark.slow
def test_a_bias_of_one_value():
    weight = RNG.normal(size=(8, 16)).astype(np.float32)
    bias = device.unsplat(np.ones(16, np.float32))

    def make(dtype):
        def fn(x):
            w = fake_quant(jnp.asarray(weight), np.abs(weight).max(0) / 127, None, "i8", True, 1)
            return act(act(x, 0.03, 3, dtype) @ w + bias, 0.06, 0, dtype)

        return fn

    check(["FULLY_CONNECTED"], in_types(make, X[0], scale=0.06))


@pytest.mark.slow
def test_the_converter_still_has_these_faults():
    """What `unsplat` and `dot_general` are for; where this fails, they are not needed anymore."""
    weight = RNG.normal(size=(8, 16)).astype(np.float32)
    other = RNG.normal(size=(5, 8, 6)).astype(np.float32)
    ones, zeros = np.ones(16, np.float32), np.zeros(16, np.float32)

    def product(weight, bias):
        def fn(x):
            w = fake_quant(jnp.asarray(weight), np.linspace(0.01, 0.03, 16), None, "i8", True, 1)
            return act(act(x, 0.03, 3) @ w + bias, 0.06)

        return fn

    def in_another_order(x):
        y = jnp.einsum("bti,oit->bo", act(x, 0.03, 3), act(jnp.asarray(other), 0.02))
        return act(y, 0.2)

    fns = {
        "bias": product(weight, ones),
        "weight": product(np.ones_like(weight), zeros),
        "order": in_another_order,
    }
    found = run_all({name: (fn, (X,), 0.06) for name, fn in fns.items()})
    for name, (_, error) in found.items():
        assert error > 4, name
