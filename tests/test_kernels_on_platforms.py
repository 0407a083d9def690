"""Kernels of several platforms in one plan, on a machine that may have the CPU alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quant_numerics as qn
from hijax_trace import Carrier
from interception_core.testing import installed_plugins
from jaxtap_testkit import fake_cuda
from provider_xla import PrepackedWeight, PtqProvider, QuantizationRule

W4 = QuantizationRule(weight_qtype="int4", tile_size=16)
RULES = {
    "w8": QuantizationRule(weight_qtype="int8"),
    "w8a8": QuantizationRule(weight_qtype="int8", act_qtype="int8"),
    "w4": W4,
}


@pytest.fixture(autouse=True)
def cuda(own_programs):
    """The installed plugins, and kernels for CUDA that can be lowered, and not run."""
    with installed_plugins("jaxtap_testkit.fake_cuda", without=fake_cuda.WITHOUT):
        yield


def model(params, x):
    x = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0]
    return x @ (params["head"] * params["mask"])


def arguments(rows=8):
    rng = np.random.default_rng(0)
    shapes = {"layers": (2, 64, 64), "head": (64, 32), "mask": (64, 32)}
    params = {name: jnp.asarray(rng.normal(size=s) / 8, "float32") for name, s in shapes.items()}
    return params, jnp.asarray(rng.normal(size=(rows, 64)), jnp.float32)


def leaves(tree):
    def is_one(node):
        return isinstance(node, qn.QArray | qn.PackedQArray | PrepackedWeight)

    return jax.tree.leaves(tree, is_leaf=is_one)


@pytest.fixture(params=RULES.values(), ids=RULES)
def rule(request):
    return request.param


@pytest.mark.sample(2)
def test_a_plan_has_the_kernel_of_each_platform(rule):
    params, x = arguments()
    plan = PtqProvider(rule).plan(model, params, x)
    quantized = [op for op in plan.ops if op.quantized]
    assert len(quantized) == 2
    for op in quantized:
        assert op.kernels["cpu"].kernel.startswith("te_ffi_kernels.")
        assert op.kernels["cuda"].kernel.startswith("fake_cuda.")
        assert op.kernel == op.kernels["cpu"].kernel
        assert f"{op.kernels['cpu'].kernel} (cpu), {op.kernels['cuda'].kernel} (cuda)" in str(plan)
    assert plan.as_json()["weights"][0]["packed"] == ["cpu", "cuda"]


def test_a_reason_for_each_platform():
    (params, x), rule = arguments(), dataclasses.replace(W4, tile_size=4)
    plan = PtqProvider(rule).plan(lambda p, x: x @ p["head"], params, x)
    (op,) = plan.ops
    assert op.kernel is None
    assert all("groups of 4 rows" in one.reason for one in op.kernels.values())
    # packed_take has a kernel on one of the platforms.
    plan = PtqProvider(RULES["w8"]).plan(
        lambda p, ids: p["head"][ids] @ p["head"].T, params, jnp.arange(3)
    )
    assert {name: one.reason for name, one in plan.ops[0].kernels.items()} == {
        "cpu": None,
        "cuda": "a lookup, and no kernel for packed_take on cuda",
    }
    assert list(plan.weights["args[0]['head']"].packings) == ["cpu"]


@pytest.mark.sample(1)
def test_stored_forms_of_platforms(rule):
    params, x = arguments()
    plan = PtqProvider(rule).plan(model, params, x)
    here, qvalue = plan.quantize(params), plan.quantize(params, prepack=False)
    there = plan.convert(here, platform="cuda")
    for tree, platform in ((here, "cpu"), (there, "cuda")):
        found = [one for one in leaves(tree) if isinstance(one, PrepackedWeight)]
        assert [one.platform for one in found] == [platform] * 2
        back = plan.convert(tree)
        assert jax.tree.structure(back) == jax.tree.structure(qvalue)
        jax.tree.map(np.testing.assert_array_equal, back, qvalue)
        jax.tree.map(np.testing.assert_array_equal, plan.convert(tree, "gpu"), there)
        jax.tree.map(np.testing.assert_array_equal, plan.convert(tree, "cpu"), here)
    assert not any(isinstance(one, PrepackedWeight) for one in leaves(plan.convert(here, "tpu")))
    assert isinstance(there["head"], Carrier) or isinstance(there["mask"], Carrier)


@pytest.mark.sample(1)
def test_what_runs_where(rule):
    """Each platform's kernels are in the program for it, whichever a weight was stored for."""
    params, x = arguments()
    plan = PtqProvider(rule).plan(model, params, x)
    run = jax.jit(plan.apply(model))
    stored = {name: plan.convert(plan.quantize(params), name) for name in ("cpu", "cuda")}
    for weights in stored.values():
        traced = run.trace(weights, x)
        text = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda")}
        assert "fake_cuda" not in text["cpu"]
        assert "@te_ffi_kernels" in text["cpu"]
        assert "@fake_cuda.ge" in text["cuda"]
        assert "dot_general" not in text["cuda"]
        assert "@te_ffi_kernels" not in text["cuda"]
    y = run(plan.quantize(params, prepack=False), x)
    for weights in stored.values():
        np.testing.assert_allclose(run(weights, x), y, rtol=2e-5, atol=2e-5)


def test_one_platform_needs_no_branch():
    params, x = arguments()
    with installed_plugins(without=fake_cuda.WITHOUT):
        plan = PtqProvider(RULES["w8"]).plan(model, params, x)
        stored = plan.quantize(params)
        text = jax.jit(plan.apply(model)).lower(stored, x).as_text()
    # What JAX would run elsewhere is not in it.
    assert "dot_general" not in text
    assert list(plan.ops[0].kernels) == ["cpu"]
