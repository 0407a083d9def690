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

GAMMA, BETA = jnp.linspace(0.5, 1.5, 64), jnp.linspace(-1, 1, 64)


def run(x, gamma=GAMMA, mode=0, layout=0, **options):
    return te.normalization_fwd(
        x, gamma, BETA, False, 1e-5, "layernorm", None, mode, layout, jnp.ones(1) * 30, **options
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(("mode", "layout"), [(0, 0), (1, 2), (2, 0), (64, 2)])
def test_vmap_and_scan(mode, layout):
    x = normal(3, 32, 64)
    one = lambda x: run(x, mode=mode, layout=layout)  # noqa: E731
    by_vmap = jax.jit(jax.vmap(one))(x)
    by_scan = jax.jit(lambda x: jax.lax.scan(lambda c, x: (c, one(x)), 0, x)[1])(x)
    for i in range(3):
        for found, other, wanted in zip(by_vmap, by_scan, one(x[i]), strict=True):
            np.testing.assert_array_equal(np.asarray(found)[i], np.asarray(wanted))
            np.testing.assert_array_equal(np.asarray(other)[i], np.asarray(wanted))


def calls(fn, *args):
    text = jax.jit(fn).lower(*args).compile().as_text()
    return text.count('custom_call_target="te_ffi_kernels.norm_forward"'), "while" in text


def test_a_batch_is_more_rows():
    x = normal(3, 2, 32, 64)
    assert calls(jax.vmap(jax.vmap(run)), x) == (1, False)
    assert calls(jax.vmap(functools.partial(run, mode=64)), x) == (1, False)
    assert calls(jax.vmap(functools.partial(run, mode=1)), x) == (1, True)


def test_vmap_of_all():
    x, gamma = normal(3, 5, 64), normal(3, 64, seed=1)

    def loss(op, x, gamma):
        return jnp.sum(jnp.sin(op(x, gamma, BETA)))

    for axes in ((0, None), (None, 0)):
        given = [a if axis == 0 else a[0] for a, axis in zip((x, gamma), axes, strict=True)]
        one, other = (
            jax.jit(jax.vmap(jax.grad(functools.partial(loss, m.layernorm), (0, 1)), axes))(*given)
            for m in (te, reference)
        )
        for found, wanted in zip(one, other, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_gradients_of_gradients(kind, leaks):
    x = normal(3, 64)

    def second(op, jit):
        loss = lambda x, g: jnp.sum(jnp.sin(op(x, g, BETA, kind)))  # noqa: E731
        both = lambda x, g: sum(jnp.sum(d**2) for d in jax.grad(loss, (0, 1))(x, g))  # noqa: E731
        return jit(jax.grad(both, (0, 1)))(x, GAMMA)

    both = second(te.layernorm, leaks), second(reference.layernorm, jax.jit)
    for found, wanted in zip(*both, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4)


def test_shard_map():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(x, gamma):
        out = te.layernorm(x, gamma, BETA)
        return jax.lax.psum(jnp.sum(out**2), "i")

    both = jax.shard_map(
        jax.grad(loss, (0, 1)), mesh=mesh, in_specs=(P("i"), P()), out_specs=(P("i"), P())
    )
    x = normal(4, 64)
    wanted = jax.grad(lambda x, g: jnp.sum(te.layernorm(x, g, BETA) ** 2), (0, 1))(x, GAMMA)
    for found, one in zip(jax.jit(both)(x, GAMMA), wanted, strict=True):
        np.testing.assert_allclose(found, one, rtol=1e-6)


def test_export():
    def both(x):
        return jax.value_and_grad(lambda x: te.layernorm(x, GAMMA, BETA)[0, 0])(x)

    x = normal(8, 64)
    checks = te.export_checks()
    exported = jax.export.export(jax.jit(both), platforms=["cpu"], disabled_checks=checks)(x)
    again = jax.export.deserialize(exported.serialize())
    for one, other in zip(again.call(x), both(x), strict=True):
        np.testing.assert_array_equal(one, other)


def test_warm_ups_are_of_call_sites():
    def layers(x):
        return te.layernorm(te.layernorm(x, GAMMA, BETA), GAMMA, BETA)

    before = te.warm_counts().get("te_ffi_kernels.norm_forward", 0)
    compiled = jax.jit(layers).lower(normal(32, 64)).compile()
    jax.block_until_ready(compiled(normal(32, 64)))
    assert te.warm_counts()["te_ffi_kernels.norm_forward"] == before + 2


X = jnp.ones((4, 64))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"x": X.astype(jnp.int32)}, TypeError, "x must.*got int32"),
        ({"x": jnp.ones(())}, ValueError, r"x must.*got .*\(\)"),
        ({"gamma": GAMMA[:3]}, ValueError, r"gamma must have shape \(64,\).*got .*\(3,\)"),
        ({"gamma": GAMMA.astype(jnp.bfloat16)}, TypeError, "gamma must.*got bfloat16"),
        ({"beta": BETA[:3]}, ValueError, r"beta must.*got .*\(3,\)"),
        ({"beta": BETA.astype(jnp.bfloat16)}, TypeError, "beta must.*got bfloat16"),
        ({"beta": None}, ValueError, "beta must.*got None"),
        ({"norm_type": "batchnorm"}, ValueError, "norm_type must.*got 'batchnorm'"),
        ({"norm_type": 2}, ValueError, "norm_type must.*got 2"),
        ({"epsilon": -1.0}, ValueError, "epsilon must.*got -1.0"),
        ({"epsilon": float("nan")}, ValueError, "epsilon must.*got nan"),
        ({"out_dtype": jnp.int8}, TypeError, "out_dtype must be float32.*got int8"),
        ({"out_dtype": jnp.int8, "scaling_mode": 2}, TypeError, "out_dtype must.*got int8"),
        ({"scaling_mode": 4}, NotImplementedError, "NVFP4"),
        ({"scaling_mode": 7}, ValueError, "scaling_mode must.*got 7"),
        ({"scaling_mode": 1, "x": X[0]}, ValueError, "an axis of rows"),
    ],
)
def test_bad_input(given, error, message):
    args = {"x": X, "gamma": GAMMA, "beta": BETA, "norm_type": "layernorm"} | given
    for module in (te, reference):
        with pytest.raises(error, match=message):
            module.layernorm(**args)
        more = {"zero_centered_gamma": False, "epsilon": 1e-6}
        with pytest.raises(error, match=f"normalization_fwd: .*{message}"):
            module.normalization_fwd(**(more | args))


def test_bad_input_of_one():
    args = (X, GAMMA, BETA, False, 1e-6, "layernorm")
    for given, error, message in (
        ({"q_layout": 3, "scaling_mode": 1}, ValueError, "q_layout must.*got 3"),
        ({"q_layout": 3}, ValueError, "q_layout must.*got 3"),
        ({"scaling_mode": 2, "q_layout": 1}, ValueError, r"axis 0 of the result must.*\(4, 64\)"),
        ({"scaling_mode": 1, "scale": jnp.ones(2)}, ValueError, r"scale must.*got .*\(2,\)"),
        ({"amax": jnp.ones(1, jnp.int32)}, TypeError, "amax must.*got int32"),
        (
            {"scaling_mode": 1, "output_amax_when_no_scaling": True},
            ValueError,
            "output_amax_when_no_scaling",
        ),
    ):
        for op in (te.normalization_fwd, reference.normalization_fwd):
            with pytest.raises(error, match=f"normalization_fwd: {message}"):
                op(*args, **given)
    mu, rsigma = jnp.zeros(4), jnp.ones(4)
    for given, error, message in (
        ((X[:3], X, mu, rsigma), ValueError, r"dz must.*got .*\(3, 64\)"),
        ((X.astype(jnp.float16), X, mu, rsigma), TypeError, "dz must.*got float16"),
        ((X, X, None, rsigma), ValueError, "mu must.*got None"),
        ((X, X, mu[:2], rsigma), ValueError, r"mu must.*got .*\(2,\)"),
        ((X, X, mu, rsigma[:2]), ValueError, r"rsigma must.*got .*\(2,\)"),
        ((X, X, mu, rsigma.astype(jnp.float16)), TypeError, "rsigma must.*got float16"),
    ):
        for op in (te.normalization_bwd, reference.normalization_bwd):
            with pytest.raises(error, match=f"normalization_bwd: {message}"):
                op(*given, GAMMA, BETA, False, 1e-6, "layernorm")


FORWARD = {
    "norm_type": 0,
    "zero_centered_gamma": False,
    "epsilon": np.float64(1e-6),
    "sm_margin": 0,
    "scaling_mode": 0,
    "quantize_layout": 0,
    "output_amax_when_no_scaling": False,
}


def target(name, results, operands, **attributes):
    te.register()
    results = [jax.ShapeDtypeStruct(*result) for result in results]
    results += workspace() if name == "norm_backward" else []
    return jax.ffi.ffi_call(f"te_ffi_kernels.{name}", results)(*operands, **attributes)


F32, E4M3 = jnp.float32, jnp.float8_e4m3fn


@pytest.mark.parametrize(
    ("message", "operands", "results", "attributes"),
    [
        ("x must.*got int32", {0: X.astype(jnp.int32)}, {}, {}),
        ("gamma must.*got float32.63.", {3: GAMMA[:63]}, {}, {}),
        ("beta must.*got float16", {4: BETA.astype(jnp.float16)}, {}, {}),
        ("beta must.*got float32.1.", {4: BETA[:1]}, {}, {}),
        ("amax must.*got float32.2.", {2: jnp.ones(2)}, {}, {}),
        ("output must.*got bfloat16", {}, {0: ((4, 64), jnp.bfloat16)}, {}),
        ("output must.*got float32.4, 63.", {}, {0: ((4, 63), F32)}, {}),
        ("mu must.*got float32.3.", {}, {5: ((3,), F32)}, {}),
        ("rsigma must.*got float32.5.", {}, {6: ((5,), F32)}, {}),
        ("norm_type must.*got 2", {}, {}, {"norm_type": 2}),
        ("epsilon must.*got -1", {}, {}, {"epsilon": np.float64(-1)}),
        ("scaling_mode must not be NVFP4.*got 5", {}, {}, {"scaling_mode": 5}),
        ("q_layout must.*got 9", {}, {}, {"quantize_layout": 9}),
        ("output must.*got float32", {}, {}, {"scaling_mode": 1}),
        ("scale must.*got float32.0.", {1: jnp.ones(0)}, {0: ((4, 64), E4M3)}, {"scaling_mode": 1}),
        ("rows", {}, {0: ((4, 64), E4M3), 1: ((4, 64), E4M3), 2: ((8,), jnp.uint8),
                      3: ((8,), jnp.uint8)}, {"scaling_mode": 2, "quantize_layout": 2}),
        ("output_amax_when_no_scaling", {}, {0: ((4, 64), E4M3)},
         {"scaling_mode": 1, "output_amax_when_no_scaling": True}),
    ],
)  # fmt: skip
def test_forward_target_refuses(message, operands, results, attributes):
    one = ((1,), F32)
    given = dict(enumerate([X, jnp.ones(1), jnp.zeros(1), GAMMA, BETA])) | operands
    wanted = [((4, 64), F32), one, one, one, one, ((4,), F32), ((4,), F32), one]
    made = dict(enumerate(wanted)) | results
    args = ("norm_forward", list(made.values()), list(given.values()))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=f"te_ffi_kernels.norm_forward: .*{message}"
    ):
        jax.block_until_ready(target(*args, **(FORWARD | attributes)))


@pytest.mark.parametrize(
    ("message", "operands", "results"),
    [
        ("dz must.*got bfloat16", {0: X.astype(jnp.bfloat16)}, {}),
        ("dz must.*got float32.3, 64.", {0: X[:3]}, {}),
        ("mu must.*got float32.3.", {2: jnp.ones(3)}, {}),
        ("rsigma must.*got float32.3.", {3: jnp.ones(3)}, {}),
        ("gamma must.*got float32.3.", {4: jnp.ones(3)}, {}),
        ("dx must.*got float32.3, 64.", {}, {0: ((3, 64), F32)}),
        ("dgamma must.*got float16", {}, {1: ((64,), jnp.float16)}),
        ("dbeta must.*got float32.1.", {}, {2: ((1,), F32)}),
    ],
)
def test_backward_target_refuses(message, operands, results):
    given = dict(enumerate([X, X, jnp.zeros(4), jnp.ones(4), GAMMA])) | operands
    made = dict(enumerate([((4, 64), F32), ((64,), F32), ((64,), F32), ((1,), F32)])) | results
    attributes = {"norm_type": 0, "zero_centered_gamma": False, "sm_margin": 0}
    args = ("norm_backward", list(made.values()), list(given.values()))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=f"te_ffi_kernels.norm_backward: {message}"
    ):
        jax.block_until_ready(target(*args, **attributes))
