"""Bad input is an error that names the op and the argument: of Python, and of the handlers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.te.calls import workspace
from te_ffi_kernels import reference
from te_ffi_kernels.matmul.config import Attributes

pytestmark = pytest.mark.sample(2)

E4M3, E5M2, E8M0 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e8m0fnu
ONE, ZERO, NONE = jnp.ones((1,)), jnp.zeros((1,)), jnp.zeros((0,))
X = jnp.ones((32, 64))
EXTRA = (jnp.zeros((0,), jnp.uint32), ZERO, jnp.zeros((1, 1), jnp.bfloat16))


def quantize(op, x=X, out=E4M3, mode=1, layout=2, axis=-1, scale=ONE, amax=ZERO, **options):
    return op(x, scale, amax, *EXTRA, out, mode, layout, axis, **options)


BAD_QUANTIZE = [
    ({"x": jnp.ones((4,))}, ValueError, "flatten_axis must.*got -1"),
    ({"axis": 0}, ValueError, "flatten_axis must.*got 0"),
    ({"axis": 2}, ValueError, "flatten_axis must.*got 2"),
    ({"x": jnp.ones((4, 4), jnp.int32)}, TypeError, "x must.*got int32"),
    ({"out": jnp.float16}, TypeError, "out_dtype must.*got float16"),
    ({"out": jnp.int8, "mode": 2}, TypeError, "out_dtype must.*got int8"),
    ({"mode": 0}, ValueError, "scaling_mode must.*got NO_SCALING"),
    ({"mode": 7}, ValueError, "scaling_mode must.*got 7"),
    ({"mode": 4}, NotImplementedError, "NVFP4"),
    ({"layout": 3}, ValueError, "q_layout must.*got 3"),
    ({"x": jnp.ones((31, 64)), "mode": 2}, ValueError, r"axis 0 of x must.*\(31, 64\)"),
    ({"x": jnp.ones((32, 65)), "mode": 2}, ValueError, r"axis 1 of x must.*\(32, 65\)"),
    ({"scale_dtype": jnp.float16}, TypeError, "scale_dtype must.*got float16"),
    ({"stochastic_rounding": True}, NotImplementedError, "stochastic_rounding must.*got [tT]rue"),
    ({"use_rht": True}, NotImplementedError, "use_rht must.*got [tT]rue"),
]


@pytest.mark.parametrize(("given", "error", "message"), BAD_QUANTIZE)
@pytest.mark.parametrize("op", [te.dbias_quantize, reference.dbias_quantize])
def test_quantize(op, given, error, message):
    with pytest.raises(error, match=f"dbias_quantize: .*{message}"):
        quantize(op, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale": jnp.ones((2,))}, r"scale must.*got .*\(2,\)"),
        ({"amax": jnp.ones((2,))}, r"amax must.*got .*\(2,\)"),
    ],
)
def test_quantize_numbers(given, message):
    with pytest.raises(ValueError, match=f"dbias_quantize: {message}"):
        quantize(te.dbias_quantize, **given)
    with pytest.raises(TypeError, match=r"dbias_quantize: scale must.*got float16"):
        quantize(te.dbias_quantize, scale=jnp.ones((1,), jnp.float16))


def test_only_the_blocks_that_are_wanted():
    assert quantize(te.dbias_quantize, x=jnp.ones((31, 64)), mode=2, layout=0)[2].shape == (31, 2)
    assert quantize(te.dbias_quantize, x=jnp.ones((32, 65)), mode=2, layout=1)[3].shape == (1, 65)


CODES = jnp.ones((32, 64), E4M3)


@pytest.mark.parametrize("op", [te.dequantize, reference.dequantize])
@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((X, ZERO, ZERO, ONE), TypeError, "x must.*got float32"),
        ((CODES, ZERO, ZERO, jnp.ones((2,))), ValueError, r"scale_inv must.*got .*\(2,\)"),
        (
            (CODES, ZERO, ZERO, jnp.ones((1,), E8M0)),
            TypeError,
            "scale_inv must.*got float8_e8m0fnu",
        ),
        ((CODES, ZERO, ZERO, ONE, E4M3), TypeError, "out_dtype must.*got float8_e4m3fn"),
        (
            (CODES, ZERO, ZERO, jnp.ones((1, 64), E8M0), jnp.float32, 2),
            ValueError,
            r"scale_inv must have shape \(32, 2\).*got .*\(1, 64\)",
        ),
        ((CODES, ZERO, ZERO, ONE, jnp.float32, 64), ValueError, r"must have shape \(32,\)"),
        (
            (CODES, ZERO, ZERO, ONE, jnp.float32, 64, False, 0),
            ValueError,
            "flatten_axis must.*got 0",
        ),
    ],
)
def test_dequantize(op, args, error, message):
    with pytest.raises(error, match=f"dequantize: .*{message}"):
        op(*args)


def test_grouped():
    sizes = jnp.asarray([16, 16], jnp.int32)
    two = jnp.ones((2,))
    for given, error, message in (
        (
            (X, two, sizes.astype(jnp.float32), E4M3, 1, 0),
            TypeError,
            "group_sizes must.*got float32",
        ),
        ((X, two, sizes[None], E4M3, 1, 0), ValueError, "group_sizes must.*got shape"),
        ((X, ONE, sizes, E4M3, 1, 0), ValueError, r"scale must.*got .*\(1,\)"),
        ((X, two, sizes, jnp.int8, 2, 0), TypeError, "out_dtype must.*got int8"),
        ((jnp.ones((33, 64)), two, sizes, E4M3, 2, 1), ValueError, r"x must.*got .*\(33, 64\)"),
    ):
        with pytest.raises(error, match=f"grouped_quantize: .*{message}"):
            te.grouped_quantize(*given)


def matmul(op, lhs=X, ls=NONE, rhs=X, rs=NONE, bias=NONE, alpha=ONE, beta=ZERO, **options):
    given = {"out": jnp.float32, "dims": ((1,), (1,)), "mode": 0} | options
    out, dims, mode = given.pop("out"), given.pop("dims"), given.pop("mode")
    return op(lhs, ls, rhs, rs, bias, alpha, beta, out, dims, mode, **given)


BLOCKS = jnp.ones((32, 2), E8M0)


@pytest.mark.parametrize("op", [te.gemm_v2, reference.gemm_v2])
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"lhs": X.astype(jnp.float16)}, TypeError, "lhs and rhs must.*got float16 and float32"),
        ({"lhs": CODES}, TypeError, "lhs must.*got float8_e4m3fn"),
        (
            {"rhs": jnp.ones((32, 63))},
            ValueError,
            r"rhs must have 64 .*got 63 in shape",
        ),
        ({"dims": ((0, 1), (1,))}, ValueError, r"contracting_dims of lhs must.*got \(0, 1\)"),
        ({"lhs": X[None], "dims": ((1,), (1,))}, ValueError, r"dims of lhs must.*got \(1,\)"),
        ({"dims": ((1,), ())}, ValueError, r"contracting_dims of rhs must.*got \(\)"),
        ({"out": E4M3}, TypeError, "out_dtype must.*got float8_e4m3fn"),
        ({"bias": jnp.ones((31,))}, ValueError, r"bias must.*got .*\(31,\)"),
        ({"bias": jnp.ones((32,), jnp.float16)}, TypeError, "bias must.*got float16"),
        ({"alpha": jnp.ones((2,))}, ValueError, r"alpha must.*got .*\(2,\)"),
        ({"beta": jnp.ones((1,), jnp.float16)}, TypeError, "beta must.*got float16"),
        ({"mode": 5}, NotImplementedError, "NVFP4"),
        ({"mode": 6}, ValueError, "scaling_mode must.*got 6"),
        ({"collective_op": 1}, NotImplementedError, "collective_op must.*got 1"),
        ({"mode": 1}, TypeError, "lhs must.*got float32"),
        ({"lhs": CODES, "rhs": CODES, "mode": 1}, ValueError, r"lhs_scale_inv must.*got .*\(0,\)"),
        (
            {"lhs": CODES, "rhs": CODES, "mode": 64, "ls": jnp.ones((32,))},
            ValueError,
            r"rhs_scale_inv must have shape \(32,\).*got .*\(0,\)",
        ),
        (
            {"lhs": CODES, "rhs": CODES, "mode": 2, "ls": BLOCKS, "rs": BLOCKS.T},
            ValueError,
            r"rhs_scale_inv must.*got .*\(2, 32\)",
        ),
        (
            {"lhs": CODES[:, :33], "rhs": CODES[:, :33], "mode": 2, "ls": BLOCKS, "rs": BLOCKS},
            ValueError,
            r"axis 1 of lhs must.*\(32, 33\)",
        ),
        (
            {"lhs": CODES.astype(E5M2), "rhs": CODES.astype(E5M2), "mode": 1, "ls": ONE, "rs": ONE},
            TypeError,
            "float8_e5m2 twice",
        ),
    ],
)
def test_gemm_v2(op, given, error, message):
    with pytest.raises(error, match=f"gemm_v2: .*{message}"):
        matmul(op, **given)


@pytest.mark.filterwarnings("ignore:te_ffi_kernels.gemm is deprecated")
def test_gemm():
    args = (X, NONE, X, NONE, NONE, NONE, ONE, ZERO, jnp.float32, ((1,), (1,)), 0)
    for given, message in (
        ({"fuse_bias": True}, "bias must have shape"),
        ({"fuse_gelu": True, "grad": True}, "gelu_input must have shape"),
    ):
        with pytest.raises(ValueError, match=f"gemm: {message}"):
            reference.gemm(*args, **given)
        with (
            pytest.warns(DeprecationWarning, match="gemm_v2"),
            pytest.raises(ValueError, match=f"gemm: {message}"),
        ):
            te.gemm(*args, **given)


# What follows calls the targets themselves, as another front end would.


def target(name, results, operands, **attributes):
    te.register()
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    results += workspace() if name == "dbias_quantize" else []
    call = jax.ffi.ffi_call(f"te_ffi_kernels.{name}", results)
    return jax.block_until_ready(call(*operands, **attributes))


def fails(message, *args, **attributes):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        target(*args, **attributes)


QUANTIZE = {
    "scaling_mode": 1,
    "q_layout": 2,
    "is_dbias": True,
    "flatten_axis": -1,
    "stochastic_rounding": False,
    "use_rht": False,
}


def raw_quantize(message=None, x=X, scale=ONE, amax=ZERO, changed=None, **attributes):
    results = [((32, 64), E4M3), ((64, 32), E4M3), ((1,), jnp.float32), ((1,), jnp.float32)]
    results += [((1,), jnp.float32), ((64,), jnp.float32), ((1,), jnp.float32)]
    for at, result in (changed or {}).items():
        results[at] = result
    args = ("dbias_quantize", results, (x, scale, amax, *EXTRA))
    attributes = QUANTIZE | attributes
    if message is None:
        return target(*args, **attributes)
    return fails(f"te_ffi_kernels.dbias_quantize: {message}", *args, **attributes)


def test_quantize_target():
    found = raw_quantize()
    np.testing.assert_array_equal(found[5], np.full(64, 32))
    np.testing.assert_array_equal(np.asarray(found[1], np.float32), np.ones((64, 32)))


@pytest.mark.parametrize(
    ("message", "given"),
    [
        ("x must.*got int32", {"x": X.astype(jnp.int32)}),
        ("flatten_axis must have axes of x.*got -1", {"x": jnp.ones((2048,))}),
        ("flatten_axis must.*got 0", {"flatten_axis": 0}),
        ("flatten_axis must.*got 5", {"flatten_axis": 5}),
        ("scale must.*got float16", {"scale": ONE.astype(jnp.float16)}),
        (r"scale must.*got float32\[2\]", {"scale": jnp.ones(2)}),
        ("amax must.*got float32", {"amax": jnp.ones(2)}),
        ("output must.*got float32", {"changed": {0: ((32, 64), jnp.float32)}}),
        (r"output must.*got float8_e4m3fn\[31, 64\]", {"changed": {0: ((31, 64), E4M3)}}),
        ("colwise_output must.*got float8_e5m2", {"changed": {1: ((64, 32), E5M2)}}),
        ("scale_inv must.*got float32", {"changed": {2: ((2,), jnp.float32)}}),
        ("colwise_scale_inv must.*got int32", {"changed": {3: ((1,), jnp.int32)}}),
        ("updated_amax must.*got float32", {"changed": {4: ((2,), jnp.float32)}}),
        ("dbias must.*got float32", {"changed": {5: ((63,), jnp.float32)}}),
        ("dbias must.*got bfloat16", {"changed": {5: ((64,), jnp.bfloat16)}}),
        ("scaling_mode must.*got 0", {"scaling_mode": 0}),
        ("scaling_mode must not be NVFP4.*got 4", {"scaling_mode": 4}),
        ("scaling_mode must.*got 99", {"scaling_mode": 99}),
        ("q_layout must.*got 3", {"q_layout": 3}),
        ("stochastic_rounding must.*got [tT]rue", {"stochastic_rounding": True}),
        ("use_rht must.*got [tT]rue", {"use_rht": True}),
        ("scale_inv must .*float8_e8m0fnu.*got float32", {"scaling_mode": 2}),
    ],
)
def test_quantize_target_refuses(message, given):
    raw_quantize(message, **given)


def test_quantize_target_refuses_blocks():
    x = jnp.ones((33, 32))
    changed = {0: ((33, 32), E4M3), 2: ((33,), jnp.uint8), 1: ((33, 32), E4M3)}
    changed |= {3: ((33,), jnp.uint8)}
    raw_quantize("the rows .*of x must.*got 33", x, changed=changed, scaling_mode=2)


def test_dequantize_target():
    operands = (CODES, ZERO, ZERO, ONE)
    result = [((32, 64), jnp.float32)]
    np.testing.assert_array_equal(target("dequantize", result, operands)[0], X)
    head = "te_ffi_kernels.dequantize: "
    fails(head + "x must.*got float32", "dequantize", result, (X, *operands[1:]))
    fails(head + "scale_inv must.*got float32", "dequantize", result, (CODES, ZERO, ZERO, NONE))
    fails(head + "output must", "dequantize", [((32, 63), jnp.float32)], operands)
    fails(head + "output must.*got int8", "dequantize", [((32, 64), jnp.int8)], operands)
    fails(head + "scaling_mode must.*got 0", "dequantize", result, operands, scaling_mode=0)
    fails(head + "attribute scaling_mode", "dequantize", result, operands, scaling_mode=1.5)
    fails(head + "scale_inv must", "dequantize", result, operands, scaling_mode=64)
    short = jnp.ones((32, 33), E4M3)
    fails(
        head + "the columns .*of x must.*got 33",
        "dequantize",
        [((32, 33), jnp.float32)],
        (short, ZERO, ZERO, BLOCKS),
        scaling_mode=2,
    )


GEMM = {
    "scaling_mode": 0,
    "collective_op": 0,
    "lhs_axis_boundary": 1,
    "rhs_axis_boundary": 1,
    "lhs_transposed": False,
    "rhs_transposed": True,
    "use_split_accumulator": False,
}


def raw_gemm(message=None, lhs=X, ls=NONE, rhs=X, rs=NONE, bias=NONE, out=None, **config):
    results = [out or ((32, 32), jnp.float32), ((1,), jnp.uint8)]
    alpha, beta = config.pop("alpha", ONE), config.pop("beta", ZERO)
    without = config.pop("without", None)
    config = GEMM | config
    config.pop(without, None)
    args = ("gemm_v2", results, (lhs, ls, rhs, rs, bias, alpha, beta))
    if message is None:
        return target(*args, config=Attributes(config))
    return fails(f"te_ffi_kernels.gemm_v2: {message}", *args, config=Attributes(config))


ON_GPUS = pytest.mark.skipif(
    jax.default_backend() == "cpu", reason="gemm_v2 is plain JAX on CPU: GPUs have its target"
)


@ON_GPUS
def test_gemm_v2_target():
    np.testing.assert_array_equal(raw_gemm()[0], np.full((32, 32), 64))
    found = raw_gemm(bias=jnp.full((32,), -64.0), fuse_gelu=True)
    np.testing.assert_array_equal(found[0], np.zeros((32, 32)))


@ON_GPUS
@pytest.mark.parametrize(
    ("message", "given"),
    [
        ("lhs must.*got int32", {"lhs": X.astype(jnp.int32)}),
        ("rhs must.*got bfloat16", {"rhs": X.astype(jnp.bfloat16)}),
        ("rhs must have 64 contracted.*got 63", {"rhs": X[:, :63]}),
        ("lhs_axis_boundary must.*got 0", {"lhs_axis_boundary": 0}),
        ("rhs_axis_boundary must.*got 2", {"rhs_axis_boundary": 2}),
        ("lhs_axis_boundary must.*got 1", {"lhs": X[0]}),
        ("bias must.*got float32", {"bias": jnp.ones(31)}),
        ("bias must.*got bfloat16", {"bias": jnp.ones(32, jnp.bfloat16)}),
        ("alpha must.*got float32", {"alpha": jnp.ones(2)}),
        ("beta must.*got int32", {"beta": jnp.zeros(1, jnp.int32)}),
        ("beta must.*got 2", {"beta": jnp.full((1,), 2.0)}),
        ("output must.*got float8", {"out": ((32, 32), E4M3)}),
        ("output must.*got float32", {"out": ((31, 32), jnp.float32)}),
        ("collective_op must.*got 1", {"collective_op": 1}),
        ("scaling_mode must not be NVFP4.*got 5", {"scaling_mode": 5}),
        ("attribute lhs_transposed is missing", {"without": "lhs_transposed"}),
        ("lhs must.*got float32", {"scaling_mode": 1}),
        ("lhs_scale_inv must.*got float32", {"lhs": CODES, "rhs": CODES, "scaling_mode": 1}),
        (
            "rhs_scale_inv must.*got float32",
            {"lhs": CODES, "rhs": CODES, "scaling_mode": 64, "ls": jnp.ones(32), "rs": ONE},
        ),
        (
            "lhs_scale_inv must.*got float32",
            {"lhs": CODES, "rhs": CODES, "scaling_mode": 2, "ls": ONE, "rs": ONE},
        ),
        (
            "the contracted axes of lhs must.*got 33",
            {"lhs": CODES[:, :33], "rhs": CODES[:, :33], "scaling_mode": 2, "ls": BLOCKS},
        ),
        (
            "lhs and rhs are both",
            {
                "lhs": CODES.astype(E5M2),
                "rhs": CODES.astype(E5M2),
                "scaling_mode": 1,
                "ls": ONE,
                "rs": ONE,
            },
        ),
    ],
)
def test_gemm_v2_target_refuses(message, given):
    raw_gemm(message, **given)


def test_the_process_goes_on():
    raw_quantize("scaling_mode must.*got 0", scaling_mode=0)
    np.testing.assert_array_equal(raw_quantize()[5], np.full(64, 32))
