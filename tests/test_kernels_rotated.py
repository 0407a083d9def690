"""Rotated parameters in te-ffi-kernels: the kernel rotates the activation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
import te_ffi_kernels as te

W8A8 = [xla.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
INT4 = [xla.QuantizationRule(weight_qtype="int4", tile_size=32)]


def plain(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def stacks(params, x):
    return jax.lax.scan(lambda x, p: (x + plain(p, x), None), x, params)[0]


def transposed(params, x):
    return jnp.tanh(x @ params["up"].T) @ params["down"].T


def made(fn):
    rng = np.random.default_rng(0)
    w = {name: rng.normal(size=size) / 8 for name, size in (("up", (64, 96)), ("down", (96, 64)))}
    if fn is transposed:
        w = {name: one.T for name, one in w.items()}
    if fn is stacks:
        w = {name: np.stack([one, one[::-1]]) for name, one in w.items()}
    x = rng.normal(size=(5, 64))
    x[:, 3] *= 40
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (w, x))


@pytest.mark.sample(1)
@pytest.mark.parametrize("rules", [W8A8, INT4])
@pytest.mark.parametrize("fn", [plain, transposed, stacks])
def test_the_kernel_rotates(fn, rules):
    params, x = made(fn)
    plan = xla.PtqProvider(rules).plan(fn, params, x)
    stored, _ = plan.optimize(params, [(x,)], [xla.SmoothQuant(), xla.Hadamard(32)])
    run = jax.jit(plan.apply(fn))
    text = run.lower(stored, x).as_text()
    assert text.count("rotation = 32") == 2
    assert "concatenate" not in text  # of sums and differences
    qvalue, _ = plan.optimize(params, [(x,)], [xla.SmoothQuant(), xla.Hadamard(32)], prepack=False)
    unpacked = run(qvalue, x)
    np.testing.assert_allclose(run(stored, x), unpacked, rtol=1e-3, atol=1e-3 * abs(unpacked).max())
    wanted = jax.jit(fn)(params, x)
    error = np.linalg.norm(unpacked - wanted) / np.linalg.norm(wanted)
    assert error < (0.02 if rules is W8A8 else 0.2)


def test_gradients_and_maps():
    params, x = made(plain)
    plan = xla.PtqProvider(W8A8).plan(plain, params, x)
    stored, _ = plan.optimize(params, [(x,)], [xla.Hadamard(32)])
    applied = plan.apply(plain)
    found = jax.grad(lambda x: applied(stored, x).sum())(x)
    wanted = jax.grad(lambda x: plain(params, x).sum())(x)
    assert np.linalg.norm(found - wanted) < 0.03 * np.linalg.norm(wanted)
    mapped = jax.vmap(applied, (None, 0))(stored, x[:, None])
    np.testing.assert_allclose(mapped[:, 0], applied(stored, x), rtol=1e-5, atol=1e-5)


def test_rotated_before_where_a_platform_has_no_such_kernel():
    params, x = made(plain)
    plan = xla.PtqProvider(W8A8).plan(plain, params, x)
    stored, _ = plan.optimize(params, [(x,)], [xla.Hadamard(32)])
    run = jax.jit(plan.apply(plain)).trace(stored, x)
    text = run.lower(lowering_platforms=("cuda",)).as_text()
    assert "rotation" not in text


def test_rotated_by_xla_where_a_package_names_other_platforms(monkeypatch):
    params, x = made(plain)
    plan = xla.PtqProvider(W8A8).plan(plain, params, x)
    stored, _ = plan.optimize(params, [(x,)], [xla.Hadamard(32)])
    found = jax.jit(plan.apply())(stored, x)
    monkeypatch.setattr(te.PackedWeight, "rotates", ("tpu",))
    run, fewer = jax.jit(plan.apply()), x[:3]  # of another shape, which JAX has not traced
    assert "rotation" not in run.lower(stored, fewer).as_text()
    np.testing.assert_allclose(run(stored, fewer), found[:3], atol=0.02 * abs(found).max())
