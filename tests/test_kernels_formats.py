"""Parameters of other people's files run in te-ffi-kernels."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
import quant_numerics as qn
from jaxtap_testkit.store_samples import same

KINDS = {
    "Q8_0": "gemm_w8a16",
    "Q4_0": "gemm_w4a16",
    "Q4_1": "gemm_w4a16",
    "Q5_0": "gemm_w8a16",
    "Q5_1": "gemm_w8a16",
    "Q2_K": "gemm_w4a16",
    "Q3_K": "gemm_w4a16",
    "Q4_K": "gemm_w4a16",
    "Q5_K": "gemm_w8a16",
    "Q6_K": "gemm_w8a16",
    "IQ4_NL": "gemm_w4a16",
    "IQ4_XS": "gemm_w4a16",
    "MXFP4": "gemm_w4a16",
    "NVFP4": "gemm_w4a16",
}
HALVES = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208]}
HALVES |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "MXFP4": [], "NVFP4": []}
K = N = 256


def blocks(kind, seed):
    rng = np.random.default_rng(seed)
    per, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    found = rng.integers(0, 256, (N, K // per, size)).astype(np.uint8)
    for at in HALVES.get(kind, [0]):
        half = rng.uniform(0.01, 0.02, (N, K // per, 1)).astype("<f2")
        found[..., at : at + 2] = half.view(np.uint8)
    if kind == "MXFP4":
        found[..., 0] = 120 + found[..., 0] % 4
    if kind == "NVFP4":  # numbers
        found[..., :4] &= 0x3F
    return found.reshape(N, -1)


def model(params, x):
    """A contraction with each weight, stored [out, in]."""
    return {name: x @ w.T for name, w in params.items()}


def turned(params, x):
    """The same with [in, out], as JAX's libraries have it."""
    return {name: x @ w for name, w in params.items()}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for i, kind in enumerate(KINDS):
        writer.add_tensor(kind, blocks(kind, i), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.sample(1)
@pytest.mark.parametrize("fn", [model, turned])
def test_every_type_of_gguf_in_kernels(path, fn, tmp_path):
    like = {kind: jax.ShapeDtypeStruct((N, K), jnp.float32) for kind in KINDS}
    transform = (lambda w: w.T) if fn is turned else None
    names = {kind: xla.Source(kind, transform=transform) for kind in KINDS}
    loaded = xla.load_gguf(path, like=like, names=names)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, K)), jnp.float32)
    plan = xla.PtqProvider(xla.rules_of(loaded)).plan(fn, like, x)
    kernels = {op.paths: op.kernel for op in plan.ops}
    assert kernels == {
        (f"args[0]['{kind}']",): f"te_ffi_kernels.{op}" for kind, op in KINDS.items()
    }
    stored = plan.prepack(loaded)
    inner = {kind: getattr(w, "packed", None) or w.inner.packed for kind, w in stored.items()}
    assert len(inner) == len(KINDS)
    found = jax.jit(plan.apply(fn))(stored, x)
    xla.save(tmp_path / "a.safetensors", stored)
    same(xla.load(tmp_path / "a.safetensors"), loaded)
    program = plan.export(stored, x, shapes="b, ...")
    again = xla.load_exported(program.serialize())(program.parameters(loaded), x)
    wide = np.asarray(x, np.float64)
    for tensor in gguf.GGUFReader(path).tensors:
        wanted = wide @ gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(float).T
        for y in (found, again):
            error = np.linalg.norm(y[tensor.name] - wanted) / np.linalg.norm(wanted)
            # Activations have 15 bits beside scales of scales, else 23.
            bound = 3e-5 if tensor.name == "NVFP4" else 1e-5
            assert error < bound, (tensor.name, error)


def test_the_whole_range_of_integers_in_kernels(tmp_path):
    """compressed-tensors' symmetric int4 and int8 have -8 and -128, which ours have not."""
    rng = np.random.default_rng(0)
    rules = {"int4": (-8, 8, 32), "int8": (-128, 128, None)}
    weights, exact = {}, {}
    for qtype, (low, high, tile) in rules.items():
        values = rng.integers(low, high, (N, K)).astype(np.int8)
        values[0], values[1] = low, high - 1
        scale = rng.uniform(0.01, 0.02, (N, K // tile if tile else 1)).astype(np.float32)
        storage = qn.get_qtype(qtype).storage_dtype
        q = qn.qarray(jnp.asarray(values).astype(storage), scale, qtype, "float32")
        weights[f"{qtype}.weight"] = q
        exact[qtype] = values * np.repeat(scale.astype(float), tile or K, 1)
    xla.save_compressed_tensors(tmp_path / "model", weights)
    loaded = xla.load_huggingface(tmp_path / "model")
    for act_qtype, bound in ((None, 1e-5), ("int8", 0.01)):
        chosen = {"int8.weight": loaded["int8.weight"]} if act_qtype else loaded
        like = {name: jax.ShapeDtypeStruct((N, K), jnp.float32) for name in chosen}
        # The largest sums, and others.
        x = np.concatenate([np.ones((1, K)), rng.normal(size=(2, K))]).astype(np.float32)
        plan = xla.PtqProvider(xla.rules_of(chosen, act_qtype)).plan(model, like, x)
        assert all(op.kernel for op in plan.ops)
        stored = plan.prepack(chosen)
        assert all(isinstance(w, xla.PrepackedWeight) for w in stored.values())
        found = jax.jit(plan.apply(model))(stored, x)
        for name, y in found.items():
            wanted = x.astype(float) @ exact[name.removesuffix(".weight")].T
            assert np.linalg.norm(y - wanted) < bound * np.linalg.norm(wanted), name
