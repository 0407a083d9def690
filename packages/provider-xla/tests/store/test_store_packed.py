"""Weights that are packed for kernels are saved as quantized values and scales, and packed when
loaded.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
import quant_numerics as qn
from jaxtap_testkit import fake_kernels
from jaxtap_testkit.fake_kernels import kernels  # noqa: F401
from jaxtap_testkit.store_samples import mlp, mlp_params, mlp_plan, same
from provider_xla.kernels.packed import portable

RULES = {
    "int8": xla.QuantizationRule(weight_qtype="int8"),
    "int4 tiles": xla.QuantizationRule(weight_qtype="int4", tile_size=8),
    "int6": xla.QuantizationRule(weight_qtype="int6"),
    "int3 tiles": xla.QuantizationRule(weight_qtype="int3", tile_size=4),
}


def is_packed(node):
    return isinstance(node, xla.PrepackedWeight)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["a.safetensors", "a"])
@pytest.mark.parametrize("rule", RULES)
def test_round_trip(tmp_path, rule, path):
    params, path = mlp_params(), tmp_path / path
    plan = mlp_plan(RULES[rule], params=params)
    packed, qvalue = plan.quantize(params), plan.quantize(params, prepack=False)
    assert sum(map(is_packed, jax.tree.leaves(packed, is_leaf=is_packed))) == 3
    xla.save(path, packed, plan)
    same(xla.load(path), qvalue)
    same(xla.load(path, plan=plan, prepack=False), qvalue)
    same(xla.load(path, plan=plan), packed)
    x = jnp.ones((2, 16))
    run = jax.jit(plan.apply(mlp))
    np.testing.assert_array_equal(run(xla.load(path, plan=plan), x), run(packed, x))


@pytest.mark.slow
def test_the_file_is_that_of_qvalue(tmp_path):
    params = mlp_params()
    plan = mlp_plan(params=params)
    for name, prepack in (("packed", True), ("qvalue", False)):
        xla.save(tmp_path / f"{name}.safetensors", plan.quantize(params, prepack=prepack), plan)
    packed, qvalue = (tmp_path / f"{n}.safetensors" for n in ("packed", "qvalue"))
    assert packed.read_bytes() == qvalue.read_bytes()


@pytest.mark.slow
def test_weights_of_one_layout_are_unpacked_by_one_program(tmp_path):
    params = mlp_params(depth=6, width=24, out=8)
    plan = mlp_plan(params=params)
    packed = plan.quantize(params)
    before = portable._cache_size()
    xla.save(tmp_path / "a.safetensors", packed, plan)
    # The layers' and the head's.
    assert portable._cache_size() - before == 2


def test_one_scale_for_all(tmp_path):
    """Kernels have it once per column; the file, as the plan, once."""
    params = mlp_params()
    rule = xla.QtRule(weight_qtype="int8", disable_channelwise_axes=True)
    plan = xla.QtProvider(rule).plan(mlp, params, jnp.ones((2, 16)))
    packed, qvalue = plan.quantize(params), plan.quantize(params, prepack=False)
    assert qvalue["head"].scale.shape == (1, 1)
    if is_packed(packed["head"]):
        xla.save(tmp_path / "a", packed, plan)
        same(xla.load(tmp_path / "a"), qvalue)
    xla.save(tmp_path / "b", packed)
    loaded = xla.load(tmp_path / "b")
    np.testing.assert_array_equal(qn.dequantize(loaded["head"]), qn.dequantize(qvalue["head"]))


def test_what_cannot_be_unpacked(tmp_path, monkeypatch):
    params = mlp_params()
    packed = mlp_plan(params=params).quantize(params)
    monkeypatch.delattr(fake_kernels.Packed, "unpack")
    jax.clear_caches()
    with pytest.raises(xla.StoreError, match=r"head is packed for a kernel.*prepack=False"):
        xla.save(tmp_path / "a", packed)


@pytest.mark.slow
def test_another_machine(tmp_path):
    """A plan without kernels loads what one with them has saved."""
    params = mlp_params()
    plan = mlp_plan(params=params)
    xla.save(tmp_path / "a", plan.quantize(params), plan)
    provider = xla.PtqProvider(xla.QuantizationRule(weight_qtype="int4", tile_size=8))
    plain = provider.plan(mlp, params, jnp.ones((2, 16)), kernels=False)
    same(xla.load(tmp_path / "a", plan=plain), plain.quantize(params))
