"""Products with packed weights beside XLA and onnxruntime."""

import functools
import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from paired import compare

import quant_numerics as qn
import te_ffi_kernels as te

SIZE = 4096
# Weights that are taken in turn are read from memory: together they are larger than any cache.
COLD = 128 << 20
RNG = np.random.default_rng(0)


@functools.cache
def qvalue_and_scale(bits, group, index=0):
    most = 2 ** (bits - 1) - 1
    rng = np.random.default_rng(index)
    qvalue = rng.integers(-most, most + 1, (SIZE, SIZE), np.int8)
    groups = SIZE // group if group else 1
    return qvalue, rng.uniform(0.001, 0.01, (groups, SIZE)).astype(np.float32)


def copies(weight):
    """Returns as many copies of a pytree as are larger than any cache."""
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weight))
    return [jax.tree.map(lambda x: x.copy(), weight) for _ in range(-(-COLD // size))]


def in_turn(fn, x, weights):
    """Returns a call of a compiled program with the next weight."""
    compiled = jax.jit(fn).lower(x, weights[0]).compile()
    turns = itertools.cycle(weights)
    return lambda: compiled(x, next(turns)).block_until_ready()


def often(make):
    """Makes a side whose run is ten calls, one after the other, as those of a loop over tokens."""
    call = make()

    def run():
        for _ in range(10):
            call()

    return run


def ours(op, bits, x, group=0, cold=False):
    qvalue, scale = qvalue_and_scale(bits, group)
    packed = (te.pack_w8 if bits == 8 else te.pack_w4)(jnp.asarray(qvalue), jnp.asarray(scale))
    return in_turn(op, x, copies(packed) if cold else [packed])


def in_float(x, cold=False):
    qvalue, scale = qvalue_and_scale(8, 0)
    weight = jnp.asarray(qvalue * scale).astype(x.dtype)
    return in_turn(jnp.matmul, x, copies(weight) if cold else [weight])


def xla_int8(x, act, cold=False):
    """XLA's product of int8 values; activations quantized in the same way, or float."""
    qvalue, scale = qvalue_and_scale(8, 0)
    weight = qn.qarray(jnp.asarray(qvalue), jnp.asarray(scale), qtype="int8", dtype=jnp.float32)

    def product(x, weight):
        dims = (((1,), (0,)), ((), ()))
        lhs = qn.quantize_for_dot(x, (1,), "int8") if act else x
        return qn.dot_general(lhs, weight, dims)

    return in_turn(product, x, copies(weight) if cold else [weight])


def session(nodes, weights, x, domains=("",)):
    """Returns a call of an ONNX graph from x to y, on as many threads as there are cores."""
    value = functools.partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT)
    tensors = [numpy_helper.from_array(a, name) for name, a in weights.items()]
    shape = (x.shape[0], SIZE)
    graph = helper.make_graph(
        nodes, "product", [value("x", shape=x.shape)], [value("y", shape=shape)], tensors
    )
    versions = {"": 21, "com.microsoft": 1}
    imports = [helper.make_opsetid(domain, versions[domain]) for domain in domains]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    run = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    given = {"x": np.asarray(x)}
    return lambda: run.run(None, given) and None


def in_turns(calls):
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def ort_dynamic(x):
    qvalue, scale = qvalue_and_scale(8, 0)
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("MatMulInteger", ["q", "w", "z"], ["sums"]),
        helper.make_node("Cast", ["sums"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["s", "ws"], ["scale"]),
        helper.make_node("Mul", ["floats", "scale"], ["y"]),
    ]
    return session(nodes, {"w": qvalue, "ws": scale[0]}, x)


def ort_4_bits(x, group):
    qvalue, scale = qvalue_and_scale(4, group)
    # [n, blocks, bytes], two quantized values a byte, the lower first; 8 stands for 0.
    values = (qvalue + 8).astype(np.uint8).T.reshape(SIZE, SIZE // group, group)
    values = values[..., ::2] | values[..., 1::2] << 4
    node = helper.make_node(
        "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft",
        K=SIZE, N=SIZE, bits=4, block_size=group, accuracy_level=4,
    )  # fmt: skip
    weights = {"w": values, "s": np.ascontiguousarray(scale.T).reshape(-1)}
    return in_turns(
        [session([node], weights, x, ("", "com.microsoft")) for _ in range(COLD // values.nbytes)]
    )


def rows(m, dtype=jnp.float32):
    return jnp.asarray(RNG.normal(size=(m, SIZE)), dtype)


def test_one_row_int8_weights_cold(benchmark):
    x = rows(1)
    sides = {
        "XLA f32": lambda: in_float(x, cold=True),
        "kernel": lambda: ours(te.gemm_w8a16, 8, x, cold=True),
        "XLA int8 weights": lambda: xla_int8(x, act=False, cold=True),
    }
    compare(benchmark, sides, often, rounds=20, unit="ms", per=10)


@pytest.mark.parametrize("group", [32, 128])
def test_one_row_int4_weights_cold(benchmark, group):
    x = rows(1)
    sides = {
        "XLA f32": lambda: in_float(x, cold=True),
        "kernel": lambda: ours(te.gemm_w4a16, 4, x, group, cold=True),
        "onnxruntime": lambda: ort_4_bits(x, group),
    }
    compare(benchmark, sides, often, rounds=20, unit="ms", per=10)


@pytest.mark.parametrize("m", [8, 128, 512, 1024])
def test_w8a8_rows(benchmark, m):
    x = rows(m)
    sides = {
        "XLA f32": lambda: in_float(x),
        "kernel": lambda: ours(te.gemm_w8a8, 8, x),
        "XLA int8": lambda: xla_int8(x, act=True),
        "onnxruntime": lambda: ort_dynamic(x),
    }
    compare(benchmark, sides, often, rounds=7, unit="ms", per=10)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_w8a16_512_rows(benchmark, dtype):
    x = rows(512, dtype)
    sides = {
        "XLA float": lambda: in_float(x),
        "kernel": lambda: ours(te.gemm_w8a16, 8, x),
        "XLA int8 weights": lambda: xla_int8(x, act=False),
    }
    compare(benchmark, sides, lambda make: make(), rounds=10, unit="ms")


@functools.cache
def weights(bits, k, n):
    """Return a packed weight, and the same in float32."""
    most, group = 2 ** (bits - 1) - 1, 32 if bits == 4 else k
    rng = np.random.default_rng(0)
    qvalue = rng.integers(-most, most + 1, (k, n), np.int8)
    scale = rng.uniform(0.001, 0.01, (k // group, n)).astype(np.float16).astype(np.float32)
    small = jnp.asarray(scale, jnp.float32 if bits == 8 else jnp.float16)
    packed = (te.pack_w8 if bits == 8 else te.pack_w4)(jnp.asarray(qvalue), small)
    return packed, jnp.asarray(qvalue * np.repeat(scale, group, 0))


def rounds_of(m, k, n):
    """Return how many rounds take about a second, at some 100 GFLOP/s of all sides."""
    return int(np.clip(1e11 / (4 * m * k * n), 3, 40))


@pytest.mark.parametrize("m", [1, 2, 4, 8, 16, 64, 128, 512, 1024, 4096])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("k", "n"), [(1024, 1024), (4096, 4096), (1024, 32000)])
def test_rows(benchmark, k, n, dtype, m):
    """No kernel that is chosen is slower than XLA's float matmul."""
    x = jnp.asarray(RNG.normal(size=(m, k)), dtype)

    def kernel(bits):
        packed, _ = weights(bits, k, n)
        op = getattr(te, packed.matmul_op(m, quantizes=False))
        return lambda: in_turn(op, x, [packed])

    float_weight = weights(8, k, n)[1].astype(dtype)
    sides = {
        "XLA float": lambda: in_turn(jnp.matmul, x, [float_weight]),
        "kernel int8": kernel(8),
        "kernel int4": kernel(4),
    }
    rounds = rounds_of(m, k, n)
    compare(benchmark, sides, lambda make: make(), rounds=rounds, unit="ms")
    seconds = benchmark.extra_info["seconds"]
    benchmark.extra_info["ratios"] = {
        f"{side} / XLA float": seconds[side] / seconds["XLA float"]
        for side in ("kernel int8", "kernel int4")
    }


@pytest.mark.parametrize("positions", [128, 512, 2048, 8192])
@pytest.mark.parametrize("cache", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kv_heads", [16, 4])
def test_decode_attention(benchmark, kv_heads, cache, positions):
    shape = (1, kv_heads, positions, 64)
    dtype = "float32" if cache == "int8" else cache
    q = jnp.asarray(RNG.normal(size=(1, 1, 16, 64)), dtype)
    floats = [jnp.asarray(RNG.normal(size=shape), dtype) for _ in "kv"]

    def plain(q, keys, values):
        grouped = q.reshape(1, 1, kv_heads, 16 // kv_heads, 64) / 8
        weights = jax.nn.softmax(jnp.einsum("btkgd,bksd->bkgts", grouped, keys), axis=-1)
        return jnp.einsum("bkgts,bksd->btkgd", weights, values)

    def kernel():
        if cache != "int8":
            return waiting(lambda q, k, v: te.decode_attention(q, k, v, positions), q, *floats)
        stored = [jnp.asarray(RNG.integers(-127, 128, shape), jnp.int8) for _ in "kv"]
        scales = [jnp.full(shape[:3], 0.01, jnp.float32) for _ in "kv"]
        named = lambda k, v: {"key_scale": k, "value_scale": v}  # noqa: E731
        return waiting(
            lambda q, k, v, *s: te.decode_attention(q, k, v, positions, **named(*s)),
            q, *stored, *scales,
        )  # fmt: skip

    sides = {"XLA float": lambda: waiting(plain, q, *floats), "kernel": kernel}
    compare(benchmark, sides, often, rounds=12, unit="ms", per=10)


SIDE = 2048
"""Of what is quantized: larger results are new pages at each call, which is all that is timed."""


def waiting(fn, *args):
    """Returns a call of a compiled program that waits for all of its results."""
    compiled = jax.jit(fn).lower(*args).compile()
    return lambda: jax.block_until_ready(compiled(*args)) is None


def square(dtype):
    return jnp.asarray(RNG.normal(size=(SIDE, SIDE)), dtype)


def quantize_sides(x, dtype, mode, layout, dbias):
    """Transformer Engine's quantize, by the kernel and by XLA, and a copy of the input."""
    one = jnp.ones(1)
    none = jnp.zeros(1)

    def side(module):
        def run(x):
            return module.dbias_quantize(
                x, one, none, none, none, none, dtype, mode, layout, is_dbias=dbias
            )

        return waiting(run, x)

    return {
        "XLA": lambda: side(te.reference),
        "kernel": lambda: side(te),
        "copy": lambda: waiting(lambda x: -x, x),
    }


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("qvalue", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8],
                         ids=["e4m3", "e5m2", "int8"])  # fmt: skip
def test_quantize_transpose_dbias(benchmark, dtype, qvalue):
    mode = te.ScalingMode.CURRENT_TENSOR_SCALING
    layout = te.QuantizeLayout.ROWWISE_COLWISE
    sides = quantize_sides(square(dtype), qvalue, mode, layout, dbias=True)
    compare(benchmark, sides, often, rounds=10, unit="ms", per=10)


@pytest.mark.parametrize("layout", ["ROWWISE", "ROWWISE_COLWISE"])
def test_mx_quantize(benchmark, layout):
    mode, layout = te.ScalingMode.MXFP8_1D_SCALING, te.QuantizeLayout[layout]
    sides = quantize_sides(square(jnp.bfloat16), jnp.float8_e4m3fn, mode, layout, dbias=False)
    compare(benchmark, sides, often, rounds=10, unit="ms", per=10)


@pytest.mark.parametrize("mode", ["CURRENT_TENSOR_SCALING", "MXFP8_1D_SCALING"])
def test_dequantize(benchmark, mode):
    mode, none = te.ScalingMode[mode], jnp.zeros(1)
    x = square(jnp.float32).astype(jnp.float8_e4m3fn)
    scales = jnp.ones((SIDE, SIDE // 32), jnp.float8_e8m0fnu) if mode.is_mx else jnp.ones(1)

    def side(module):
        def run(x, scales):
            return module.dequantize(x, none, none, scales, jnp.float32, mode)

        return waiting(run, x, scales)

    sides = {
        "XLA": lambda: side(te.reference),
        "kernel": lambda: side(te),
        "copy": lambda: waiting(lambda x: -x, square(jnp.float32)),
    }
    compare(benchmark, sides, often, rounds=10, unit="ms", per=10)


FIRST = """
import time
import jax, jax.numpy as jnp, numpy as np
import te_ffi_kernels as te

rng = np.random.default_rng(0)
qvalue = jnp.asarray(rng.integers(-127, 128, (4096, 4096)), jnp.int8)
weight = te.reference.pack_w8(qvalue, jnp.ones((1, 4096)))
x = jnp.asarray(rng.normal(size=(1, 4096)), jnp.float32)
jax.block_until_ready((weight, x))
program = te.warmup(te.gemm_w8a16, x, weight)

def call():
    start = time.perf_counter()
    jax.block_until_ready(program(x, weight))
    return time.perf_counter() - start

first, *_ = [call() for _ in range(30)]
print(first, sorted(call() for _ in range(30))[15])
"""


def test_first_call_after_warm_up(benchmark):
    """In separate processes: the first call of a warmed program, and a steady one."""
    times = []

    def one():
        out = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, check=True)
        times.append([float(word) for word in out.stdout.split()])

    benchmark.pedantic(one, rounds=7)
    first, steady = np.median(times, axis=0)
    benchmark.extra_info["unit"] = "ms"
    benchmark.extra_info["seconds"] = {"steady": float(steady), "first": float(first)}
    benchmark.extra_info["ratios"] = {"first / steady": float(first / steady)}
