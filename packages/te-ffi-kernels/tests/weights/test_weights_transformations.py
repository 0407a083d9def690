import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from interception_core.testing import installed_plugins
from jaxtap_testkit import fake_cuda
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.te.calls import told
from jaxtap_testkit.te.weights import weight

pytestmark = pytest.mark.sample(2)

OPS = {te.gemm_w8a8: 8, te.gemm_w8a16: 8, te.gemm_w4a16: 4, te.gemm_w4a8: 4}


@pytest.fixture(params=OPS, ids=lambda op: op.__name__)
def op(request):
    return request.param


def stack(op, layers=3, k=48, n=48):
    bits = OPS[op]
    rng = np.random.default_rng(0)
    made = [weight(rng, k, n, bits) for _ in range(layers)]
    qvalue, scale = (jnp.asarray(np.stack(x)) for x in zip(*made, strict=True))
    return (te.pack_w8 if bits == 8 else te.pack_w4)(qvalue, scale)


def layer(weights, i):
    return jax.tree.map(lambda b: b[i], weights)


def rows(*shape):
    return normal(*shape, seed=1)


@pytest.mark.slow
def test_vmap_over_activations(op):
    w, x = layer(stack(op), 0), rows(4, 5, 48)
    y = jax.vmap(lambda x: op(x, w))(x)
    np.testing.assert_array_equal(y, op(x, w))
    np.testing.assert_array_equal(
        jax.vmap(lambda x: op(x, w), in_axes=1)(x), op(x, w).swapaxes(0, 1)
    )


@pytest.mark.slow
def test_vmap_over_weights(op):
    w, x = stack(op), rows(3, 5, 48)
    expected = jnp.stack([op(x[i], layer(w, i)) for i in range(3)])
    np.testing.assert_array_equal(jax.vmap(op)(x, w), expected)
    shared = jnp.stack([op(x[0], layer(w, i)) for i in range(3)])
    np.testing.assert_array_equal(jax.vmap(op, in_axes=(None, 0))(x[0], w), shared)


@pytest.mark.slow
def test_scan_over_layers(op, leaks):
    w, x = stack(op), rows(5, 48)

    def step(x, w):
        y = jnp.tanh(op(x, w))
        return y, y.sum()

    final, sums = leaks(lambda x, w: jax.lax.scan(step, x, w))(x, w)
    for i in range(3):
        x, total = step(x, layer(w, i))
        np.testing.assert_allclose(sums[i], total, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(final, x, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_while_cond_and_remat(op, leaks):
    w, x = layer(stack(op), 0), rows(2, 48)

    @leaks
    def run(x, n):
        x = jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(op(x, w)), x)
        return jax.lax.cond(n > 1, lambda x: op(x, w), lambda x: x, x)

    expected = op(jnp.tanh(op(jnp.tanh(op(x, w)), w)), w)
    np.testing.assert_allclose(run(x, 2), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(run(x, 0), x)
    loss = lambda x: (op(x, w) ** 2).sum()  # noqa: E731
    np.testing.assert_allclose(
        leaks(jax.grad(jax.checkpoint(loss)))(x), jax.grad(loss)(x), rtol=1e-5, atol=1e-5
    )


@pytest.mark.sample(1)
def test_donation(op):
    w, x = layer(stack(op), 0), rows(48, 48)
    expected = np.asarray(op(x, w))
    donated = jax.jit(op, donate_argnums=0)
    np.testing.assert_array_equal(donated(x.copy(), w), expected)


def test_the_program_has_one_custom_call_and_no_float_weight(op):
    w, x = layer(stack(op), 0), rows(5, 48)
    text = jax.jit(op).lower(x, w).compile().as_text()
    assert text.count(f'custom_call_target="te_ffi_kernels.{op.__name__}"') == 1
    assert "f32[48,48]" not in text


def test_other_platforms_get_the_reference(op):
    """What is lowered for a platform without a kernel has no custom call."""
    w, x = layer(stack(op), 0), rows(5, 48)
    text = jax.jit(op).trace(x, w).lower(lowering_platforms=("rocm",)).as_text()
    assert "te_ffi_kernels" not in text
    assert "dot_general" in text


def test_a_process_without_the_platform_registers_nothing(op, monkeypatch):
    # Packed before, since JAX keeps what it traces, and packing runs.
    w, x = layer(stack(op), 0), rows(6, 48)
    monkeypatch.setattr(te.op, "has_backend", lambda platform: False)
    monkeypatch.setattr(te.op, "register_kernel", lambda spec: pytest.fail(spec.target))
    text = jax.jit(lambda x, w: op(x, w) + 1).lower(x, w).as_text()
    assert "te_ffi_kernels" in text


def test_export_for_several_platforms(op):
    w, x = layer(stack(op), 0), rows(5, 48)
    exported = jax.export.export(
        jax.jit(lambda x, b: op(x, dataclasses.replace(w, buffer=b))),
        platforms=("cpu", "cuda"),
        disabled_checks=te.export_checks(),
    )(x, w.buffer)
    again = jax.export.deserialize(bytearray(exported.serialize()))
    np.testing.assert_array_equal(again.call(x, w.buffer), op(x, w))


@pytest.mark.slow
def test_no_rows_and_one_column(op):
    bits = OPS[op]
    w = (te.pack_w8 if bits == 8 else te.pack_w4)(jnp.ones((48, 1), jnp.int8), jnp.ones((1, 1)))
    assert op(rows(0, 48), w).shape == (0, 1)
    assert op(rows(3, 48), w).shape == (3, 1)
    none = (te.pack_w8 if bits == 8 else te.pack_w4)(jnp.ones((48, 0), jnp.int8), jnp.ones((1, 0)))
    assert op(rows(3, 48), none).shape == (3, 0)


def test_one_weight_of_a_stack(op):
    w, x = stack(op), rows(5, 48)
    indexed = jax.jit(lambda x, w, i: op(x, w, index=i))
    # As lax.dynamic_index_in_dim: from the end, and clamped.
    for i in (0, 1, 2, -1, -3, 3, 100, -4, -100, 2**31 - 1, -(2**31)):
        one = jax.lax.dynamic_index_in_dim(w.buffer, i, keepdims=False)
        np.testing.assert_array_equal(
            indexed(x, w, i), op(x, dataclasses.replace(w, buffer=one)), err_msg=str(i)
        )


@pytest.mark.slow
def test_transformations_of_an_index(op, leaks):
    w, x = stack(op), rows(3, 5, 48)
    each = jnp.stack([op(x[i], layer(w, i)) for i in range(3)])
    np.testing.assert_array_equal(jax.vmap(lambda x, i: op(x, w, index=i))(x, jnp.arange(3)), each)
    np.testing.assert_array_equal(jax.vmap(lambda x: op(x, w, index=1))(x), op(x, layer(w, 1)))
    mapped = jax.vmap(lambda w: op(x[0], w, index=2))(jax.tree.map(lambda b: b[None], w))
    np.testing.assert_array_equal(mapped[0], op(x[0], layer(w, 2)))
    loss = lambda x, i: (op(x, w, index=i) ** 2).sum()  # noqa: E731
    expected = jax.grad(lambda x: (op(x, layer(w, 2)) ** 2).sum())(x[0])
    np.testing.assert_allclose(leaks(jax.grad(loss))(x[0], 2), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.optimized
def test_a_scan_reads_weights_where_they_lie_in_the_stack(op):
    """Nothing in the compiled program makes the bytes of one weight, or of the stack, again."""
    w, x = stack(op), rows(5, 48)

    def run(x, w):
        step = lambda x, i: (jnp.tanh(op(x, w, index=i)), None)  # noqa: E731
        return jax.lax.scan(step, x, jnp.arange(3))[0]

    def sliced(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(op(x, w)), None), x, w)[0]

    np.testing.assert_array_equal(jax.jit(run)(x, w), jax.jit(sliced)(x, w))
    made = r"= u8\[[\d,]*\]\S* (?!parameter|get-tuple-element|bitcast)"
    compiled = jax.jit(run).lower(x, w).compile()
    text = compiled.as_text()
    assert f"{op.__name__} index" in told(compiled)
    assert not re.findall(made, text)
    # What a scan over the weights themselves does copy.
    assert re.findall(made, jax.jit(sliced).lower(x, w).compile().as_text())


@pytest.mark.slow
def test_a_stack_on_other_platforms(op):
    w, x = stack(op), rows(5, 48)
    exported = jax.export.export(
        jax.jit(lambda x, b, i: op(x, dataclasses.replace(w, buffer=b), index=i)),
        platforms=("cpu", "cuda"),
        disabled_checks=te.export_checks(),
    )(x, w.buffer, 1)
    np.testing.assert_array_equal(exported.call(x, w.buffer, 1), op(x, layer(w, 1)))
    text = jax.jit(lambda x, w, i: op(x, w, index=i)).trace(x, w, 1)
    text = text.lower(lowering_platforms=("cuda",)).as_text()
    assert "te_ffi_kernels" not in text
    assert "dot_general" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: (w, jnp.ones(2, jnp.int32)), "index must be a scalar integer"),
        (lambda w: (w, 1.0), "index must be a scalar integer"),
        (lambda w: (layer(w, 0), 1), "must be a stack along one axis"),
        (lambda w: (jax.tree.map(lambda b: b[None], w), 1), "must be a stack along one axis"),
        (lambda w: (jax.tree.map(lambda b: b[:0], w), 1), "must be a stack along one axis"),
    ],
)
def test_indices_that_are_none(change, message):
    w, index = change(stack(te.gemm_w8a16))
    with pytest.raises((TypeError, ValueError), match=rf"gemm_w8a16: .*{message}"):
        te.gemm_w8a16(rows(2, 48), w, index=index)


@pytest.mark.sample(1)
def test_programs_for_platforms_that_a_process_has_not(op):
    """A weight runs in the kernels of CUDA there, or in plain JAX, and in the CPU's here."""
    with installed_plugins("jaxtap_testkit.fake_cuda", without=fake_cuda.WITHOUT):
        made = [jnp.asarray(part) for part in weight(np.random.default_rng(0), 48, 48, OPS[op])]
        pack = te.pack_w8 if OPS[op] == 8 else te.pack_w4
        w = pack(*made, platform="cuda")
        np.testing.assert_array_equal(w.buffer, pack(*made, platform="cpu").buffer)
        traced = jax.jit(lambda x, w: op(x, w) + 1).trace(rows(5, 48), w)
        text = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda")}
        assert "te_ffi_kernels." in text["cpu"]
        assert "fake_cuda" not in text["cpu"]
        in_kernel = op is not te.gemm_w4a8  # which has none on CUDA
        assert (f"@fake_cuda.{op.__name__}" in text["cuda"]) == in_kernel
        assert ("dot_general" in text["cuda"]) == (not in_kernel)
        assert "te_ffi_kernels." not in text["cuda"]


def test_the_op_that_multiplies_with_a_weight(op):
    quantizes = op in (te.gemm_w8a8, te.gemm_w4a8)
    assert layer(stack(op), 0).matmul_op(quantizes=quantizes) == op.__name__
