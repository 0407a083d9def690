"""vmap, scan, shard_map, export, gradients of gradients; and bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import te_ffi_kernels as te
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.te.calls import workspace
from te_ffi_kernels import reference

pytestmark = pytest.mark.sample(2)

NAMES = ("silu", "linear")
ONE = jnp.ones((1,))


def run(dz, x, mode=0, layout=0, is_dbias=False):
    more = (None, None, mode, layout, ONE * 30)
    return te.act_lu(x, NAMES, *more), te.quantize_dact_dbias(dz, x, NAMES, is_dbias, *more)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("mode", "layout"), [(0, 0), (1, 2), (2, 0), (64, 0)])
def test_vmap_and_scan(mode, layout):
    dz, x = normal(3, 32, 64), normal(3, 32, 2, 64, seed=1)
    one = functools.partial(run, mode=mode, layout=layout, is_dbias=mode == 1)
    by_vmap = jax.tree.leaves(jax.jit(jax.vmap(one))(dz, x))
    scan = lambda dz, x: jax.lax.scan(lambda c, given: (c, one(*given)), 0, (dz, x))[1]  # noqa: E731
    by_scan = jax.tree.leaves(jax.jit(scan)(dz, x))
    for i in range(3):
        for found, other, wanted in zip(
            by_vmap, by_scan, jax.tree.leaves(one(dz[i], x[i])), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(found)[i], np.asarray(wanted))
            np.testing.assert_array_equal(np.asarray(other)[i], np.asarray(wanted))


def test_a_batch_is_more_rows():
    dz, x = normal(3, 2, 32, 64), normal(3, 2, 32, 2, 64)
    text = jax.jit(jax.vmap(jax.vmap(run))).lower(dz, x).compile().as_text()
    assert text.count('custom_call_target="te_ffi_kernels.') == 2
    assert "while" not in text


def test_gradients_of_gradients(leaks):
    x = normal(3, 2, 5)

    def second(op):
        slope = jax.grad(lambda x: jnp.sum(jnp.sin(op(x, NAMES))))
        return jax.grad(lambda x: jnp.sum(slope(x) ** 2))

    plain = lambda x, names: jax.nn.silu(x[..., 0, :]) * x[..., 1, :]  # noqa: E731
    found, wanted = leaks(second(te.activation))(x), jax.jit(second(plain))(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_gradient_of_sums():
    dz, x = normal(5, 6), normal(5, 1, 6, seed=1)

    def loss(dz, x, op):
        return jnp.sum(jnp.sin(op(dz, x, ("gelu",), True)[5]))

    grads = (
        jax.jit(jax.grad(functools.partial(loss, op=m.quantize_dact_dbias), (0, 1)))(dz, x)
        for m in (te, reference)
    )
    for found, wanted in zip(*grads, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_shard_map():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(x, mode=0):
        return jnp.sum(te.activation(x, NAMES, None, None, mode) ** 2)

    x = normal(4, 2, 64)
    both = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    np.testing.assert_allclose(jax.jit(both)(x), jax.grad(loss)(x), rtol=1e-6)


def test_export():
    def both(x):
        return jax.value_and_grad(lambda x: te.activation(x, NAMES)[0, 0])(x)

    x = normal(8, 2, 64)
    checks = te.export_checks()
    exported = jax.export.export(jax.jit(both), platforms=["cpu"], disabled_checks=checks)(x)
    again = jax.export.deserialize(exported.serialize())
    for one, other in zip(again.call(x), both(x), strict=True):
        np.testing.assert_array_equal(one, other)


def test_warm_ups_are_of_call_sites():
    layers = lambda x: te.activation(te.activation(x)[:, None])  # noqa: E731
    before = te.warm_counts().get("te_ffi_kernels.act_lu", 0)
    compiled = jax.jit(layers).lower(normal(32, 1, 64)).compile()
    jax.block_until_ready(compiled(normal(32, 1, 64)))
    assert te.warm_counts()["te_ffi_kernels.act_lu"] == before + 2


X, DZ = jnp.ones((4, 2, 64)), jnp.ones((4, 64))
BAD_LIMIT = te.ActivationParams(te.ClampedSwigluParams(limit=-1.0))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"x": X.astype(jnp.int32)}, TypeError, "x must.*got int32"),
        ({"x": X[:, :1]}, ValueError, r"last axis but one of x must.*got shape \(4, 1, 64\)"),
        ({"x": DZ[0]}, ValueError, r"of x must.*got shape \(64,\)"),
        ({"activation_type": "tanh"}, ValueError, "activation_type must.*got 'tanh'"),
        ({"activation_type": ("linear", "silu")}, ValueError, "activation_type must"),
        ({"act_params": 7.0}, TypeError, "act_params must.*got float"),
        ({"act_params": BAD_LIMIT}, ValueError, "limit of act_params must.*got -1.0"),
        ({"out_dtype": jnp.int8}, TypeError, "out_dtype must be float32.*got int8"),
        ({"out_dtype": jnp.int8, "scaling_mode": 2}, TypeError, "out_dtype must.*got int8"),
        ({"scaling_mode": 5}, NotImplementedError, "NVFP4"),
        ({"scaling_mode": 9}, ValueError, "scaling_mode must.*got 9"),
        ({"scaling_mode": 1, "x": X[0]}, ValueError, "an axis of rows"),
        (
            {"scaling_mode": 2, "x": X[..., :33]},
            ValueError,
            r"axis 1 of the result must.*\(4, 33\)",
        ),
        ({"scaling_mode": 1, "scale": jnp.ones(2)}, ValueError, r"scale must.*got .*\(2,\)"),
    ],
)
def test_bad_input(given, error, message):
    args = {"x": X, "activation_type": NAMES} | given
    for module in (te, reference):
        for op in ("act_lu", "activation"):
            with pytest.raises(error, match=message):
                getattr(module, op)(**args)
    args["dz"] = DZ
    if "x" not in given:
        for module in (te, reference):
            with pytest.raises(error, match=f"quantize_dact_dbias: .*{message}"):
                module.quantize_dact_dbias(**args)


def test_bad_cotangents():
    for dz, error, message in (
        (DZ[:3], ValueError, r"dz must.*got .*\(3, 64\)"),
        (DZ.astype(jnp.float16), TypeError, "dz must.*got float16"),
    ):
        for module in (te, reference):
            with pytest.raises(error, match=f"quantize_dact_dbias: {message}"):
                module.dact_lu(dz, X, NAMES)


def attributes(**changed):
    found = {"act_enum": 4, "scaling_mode": 0, "quantize_layout": 0}
    found |= {"act_params": te.ActivationParams().to_ffi_lowering_dict()}
    return found | {"output_amax_when_no_scaling": False} | changed


def fails(name, message, results, operands, **given):
    te.register()
    results = [jax.ShapeDtypeStruct(*result) for result in results]
    results += workspace() if name == "dact_dbias_quantize" else []
    call = jax.ffi.ffi_call(f"te_ffi_kernels.{name}", results)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"te_ffi_kernels.{name}: .*{message}"):
        jax.block_until_ready(call(*operands, **given))


F32, E4M3 = jnp.float32, jnp.float8_e4m3fn
NONE = ((1,), F32)


@pytest.mark.parametrize(
    ("message", "x", "out", "changed"),
    [
        ("x must.*got int32", X.astype(jnp.int32), F32, {}),
        ("x must.*got float32.4, 64.", DZ, F32, {}),
        ("last axis but one of x must be 1.*got float32.4, 2, 64.", X, F32, {"act_enum": 3}),
        ("act_enum must.*got 12", X, F32, {"act_enum": 12}),
        ("act_enum must.*got -1", X, F32, {"act_enum": -1}),
        ("output must.*got float16", X, jnp.float16, {}),
        ("output must.*got float32", X, F32, {"scaling_mode": 1}),
        ("scale_inv must.*got float32.1.", X, E4M3, {"scaling_mode": 64}),
        ("scaling_mode must.*got 4", X, E4M3, {"scaling_mode": 4}),
        ("act_params has no member clamped_swiglu", X, F32, {"act_params": {"limit": 3}}),
        (
            "limit of act_params must.*got -1",
            X,
            F32,
            {"act_params": BAD_LIMIT.to_ffi_lowering_dict()},
        ),
    ],
)
def test_forward_target_refuses(message, x, out, changed):
    results = [((4, 64), out), ((1,), out), NONE, NONE, NONE]
    fails("act_lu", message, results, (x, ONE, ONE), **attributes(**changed))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("message", "dz", "out", "dbias"),
    [
        ("dz must.*got float32.3, 64.", DZ[:3], (4, 2, 64), (2, 64)),
        ("dz must.*got float16", DZ.astype(jnp.float16), (4, 2, 64), (2, 64)),
        ("output must.*got float32.4, 64.", DZ, (4, 64), (2, 64)),
        ("dbias must.*got float32.64.", DZ, (4, 2, 64), (64,)),
    ],
)
def test_backward_target_refuses(message, dz, out, dbias):
    results = [(out, F32), NONE, NONE, NONE, NONE, (dbias, F32), NONE]
    operands = (dz, X, ONE, ONE)
    fails("dact_dbias_quantize", message, results, operands, **attributes(is_dbias=True))
