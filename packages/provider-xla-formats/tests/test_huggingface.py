"""Folders by other methods than compressed-tensors, made by hand after their descriptions."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
import quant_numerics as qn
from jaxtap_testkit import huggingface_samples as samples

NAME = "model.layers.0.mlp.up_proj"
KEPT = {
    **{f"gptq, {bits} bits": lambda bits=bits: samples.gptq(bits=bits) for bits in (2, 3, 4, 8)},
    "gptq, zero points": lambda: samples.gptq(symmetric=False),
    "gptq, zero points of the second form": lambda: samples.gptq(symmetric=False, form="gptq_v2"),
    "gptq, one group": lambda: samples.gptq(group=64),
    "awq": samples.awq,
    "fp8 in blocks": samples.float8,
    "fp8 in whole blocks": lambda: samples.float8(256, 384),
    "mxfp4": samples.mxfp4,
    "nf4": samples.bitsandbytes,
    "nf4, quantized twice": lambda: samples.bitsandbytes(nested=True),
    "int8": samples.int8_rows,
}
QTYPES = {"gptq": "int", "awq": "int4", "fp8": "float8_e4m3fn", "mxfp4": "mxfp4", "nf4": "nf4"}


def rounded(numbers, dtype):
    return np.asarray(numbers, np.float32).astype(dtype)


@pytest.mark.parametrize("case", KEPT)
def test_folders_as_their_libraries_have_them(tmp_path, case):
    written = KEPT[case]()
    bias = np.ones(7, np.float16)
    written.folder(tmp_path / "in", NAME, **{f"{NAME}.bias": bias, "norm.weight": bias})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tree = xla.load_huggingface(tmp_path / "in")
    name = NAME if case == "mxfp4" else f"{NAME}.weight"
    assert tree.keys() == {name, f"{NAME}.bias", "norm.weight"}
    q = tree[name]
    assert q.qtype.startswith(QTYPES.get(case.split(",")[0].split()[0], "int8"))
    assert (q.unpacked().zero_point is not None) == ("zero points" in case or case == "awq")
    found = np.asarray(qn.dequantize(q.astype("float32")))
    np.testing.assert_allclose(found, written.numbers, rtol=3e-7, atol=1e-9)
    in_own = np.asarray(qn.dequantize(q))
    # One rounding of what is exact but for float32's last place.
    np.testing.assert_allclose(
        in_own.astype(float), rounded(written.numbers, q.dtype).astype(float), rtol=2.0**-8
    )
    np.testing.assert_array_equal(tree[f"{NAME}.bias"], bias)


def changed(make, config=(), **tensors):
    def build():
        written = make()
        written.config |= dict(config)
        for end, change in tensors.items():
            end = "." + end if not end.startswith("_") else end
            if change is None:
                written.tensors.pop(end)
            else:
                written.tensors[end] = change(written.tensors[end])
        return written

    return build


def e8m0_scales():
    written = samples.float8()
    exponents = np.random.default_rng(3).integers(
        110, 125, written.tensors[".weight_scale_inv"].shape
    )
    scale = 2.0 ** (exponents - 127.0)
    written.tensors[".weight_scale_inv"] = exponents.astype(np.uint8).view(jnp.float8_e8m0fnu)
    each = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:200, :300]
    written.numbers = written.tensors[".weight"].astype(float) * each
    return written


def zeros_for_groups(**more):
    """AutoGPTQ without act-order, which leaves zeros there; and with it, where nothing is set."""
    written = samples.gptq()
    written.config |= more
    written.tensors[".g_idx"] = np.zeros_like(written.tensors[".g_idx"])
    return written


KEPT_TOO = {
    "no act-order": lambda: zeros_for_groups(),
    "act-order that is not set": lambda: zeros_for_groups(desc_act=True),
    "bytes in bfloat16": changed(
        samples.bitsandbytes, weight=lambda x: x.reshape(-1).view(jnp.bfloat16)[:, None]
    ),
    "float8 with scales in e8m0": e8m0_scales,
}


@pytest.mark.parametrize("case", KEPT_TOO)
def test_what_some_writers_write_otherwise(tmp_path, case):
    written = KEPT_TOO[case]()
    written.folder(tmp_path / "in")
    q = xla.load_huggingface(tmp_path / "in", dtype="float32")[f"{NAME}.weight"]
    np.testing.assert_allclose(qn.dequantize(q), written.numbers, rtol=3e-7, atol=1e-9)


LOST = {
    "act-order": (lambda: samples.gptq(symmetric=False, desc_act=True), "not side by side"),
    "act-order, symmetric": (lambda: samples.gptq(desc_act=True), "not side by side"),
    "fp4": (lambda: samples.bitsandbytes(kind="fp4"), "another table of values"),
    "rows of parts of blocks": (lambda: samples.bitsandbytes(k=96), "not whole blocks of 64"),
}


@pytest.mark.parametrize("case", LOST)
def test_what_no_qarray_has_is_dequantized_and_said(tmp_path, case):
    make, why = LOST[case]
    written = make()
    written.folder(tmp_path / "in")
    with pytest.warns(xla.QuantizationWarning, match=f"1 weights of .*up_proj.weight.*{why}"):
        found = xla.load_huggingface(tmp_path / "in")[f"{NAME}.weight"]
    assert isinstance(found, jax.Array)
    np.testing.assert_array_equal(found, rounded(written.numbers, found.dtype))


def run(w, x):
    return x @ w.T


@pytest.mark.parametrize(
    "case", ["gptq, 4 bits", "gptq, zero points", "awq", "fp8 in blocks", "nf4", "int8"]
)
def test_plans_run_them(tmp_path, case):
    written = KEPT[case]()
    written.folder(tmp_path / "in")
    q = xla.load_huggingface(tmp_path / "in", dtype="float32")[f"{NAME}.weight"]
    x = np.random.default_rng(1).normal(size=(5, q.shape[1])).astype(np.float32)
    like = jax.ShapeDtypeStruct(q.shape, q.dtype)
    plan = xla.PtqProvider(xla.rules_of(q)).plan(run, like, x)
    assert "1 of 1 operations quantized" in str(plan)
    exact = x.astype(float) @ written.numbers.T
    for held in (q, plan.prepack(q)):
        found = np.asarray(jax.jit(plan.apply(run))(held, x))
        assert np.linalg.norm(found - exact) < 1e-4 * np.linalg.norm(exact)


def test_modules_of_other_bits_than_the_config_says(tmp_path):
    """GPTQModel's dynamic."""
    eight = samples.gptq(bits=8)
    eight.config["bits"] = 4
    four = {f"b{end}": array for end, array in samples.gptq().tensors.items()}
    eight.folder(tmp_path / "in", "a", **four)
    tree = xla.load_huggingface(tmp_path / "in")
    assert {name: q.qtype for name, q in tree.items()} == {"a.weight": "int8", "b.weight": "int4"}


BROKEN = {
    "marlin": (changed(samples.gptq, {"is_marlin_format": True}), "got 4 and 'marlin'"),
    "words of 16 bits": (changed(samples.gptq, qweight=lambda x: x.view(np.int16)), "got int16"),
    "words of AWQ": (changed(samples.awq, qweight=lambda x: x.view(np.int8)), "got int8"),
    "scales in bytes": (
        changed(samples.float8, weight_scale_inv=lambda x: x.astype(np.uint8)),
        "its scales must be floats, got uint8",
    ),
    "no scales": (
        changed(samples.gptq, scales=None),
        r"of gptq as its config says: it lacks '.sc",
    ),
    "other bits": (changed(samples.gptq, {"bits": 5}), "2, 3, 4, 8 bits .* got 5"),
    "other form": (changed(samples.gptq, {"checkpoint_format": "marlin"}), "got 4 and 'marlin'"),
    "cut words": (changed(samples.gptq, qweight=lambda x: x[:3]), "hold 64 rows of 1 bits"),
    "cut scales": (changed(samples.gptq, scales=lambda x: x[:, 1:]), r"as its config says: "),
    "groups": (
        changed(lambda: samples.gptq(desc_act=True), g_idx=lambda x: x + 1),
        r"64 numbers below 2 \(g_idx\)",
    ),
    "gemv": (changed(samples.awq, {"version": "gemv"}), "version gemm, got 4 and gemv"),
    "awq's scales": (changed(samples.awq, scales=lambda x: x[:, :40]), r"must be \[48, groups of"),
    "e5m2": (changed(samples.float8, {"fmt": "e5m2"}), "must be of e4m3, got 'e5m2'"),
    "float8 in int8": (
        changed(samples.float8, weight=lambda x: x.view(np.int8)),
        "must be float8_e4m3fn, got int8",
    ),
    "another block": (
        changed(samples.float8, {"weight_block_size": [64, 64]}),
        r"shape \[2, 3\] must be \[4, 5\]",
    ),
    "blocks of mxfp4": (
        changed(samples.mxfp4, _blocks=lambda x: x[..., :8]),
        "blocks must be uint8",
    ),
    "nf4 cut": (changed(samples.bitsandbytes, weight=lambda x: x[:-2]), "of 48 x 128 numbers"),
    "nf4 without its state": (
        lambda: without_state(samples.bitsandbytes()),
        "of bitsandbytes as its config says",
    ),
    "int8 in floats": (
        changed(samples.int8_rows, weight=lambda x: x.astype(np.float16)),
        "must be int8, got float16",
    ),
}


def without_state(written):
    written.tensors = {k: x for k, x in written.tensors.items() if "quant_state" not in k}
    return written


@pytest.mark.parametrize("case", BROKEN)
def test_folders_that_do_not_fit(tmp_path, case):
    make, message = BROKEN[case]
    make().folder(tmp_path / "in")
    with pytest.raises(xla.StoreError, match=message):
        xla.load_huggingface(tmp_path / "in")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "int32"])
def test_values_whose_scales_no_method_knows(tmp_path, dtype):
    """They would be taken for numbers."""
    other = np.ones((4, 4), jnp.dtype(dtype))
    samples.gptq().folder(tmp_path / "in", **{"a.weight": other, "a.scale": np.ones(4, np.float32)})
    with pytest.raises(xla.StoreError, match=rf"a.weight of .* must be floats.* got {dtype}"):
        xla.load_huggingface(tmp_path / "in")


def test_methods_that_are_not_read(tmp_path):
    config = {"quantization_config": {"quant_method": "aqlm"}}
    samples.write_folder(tmp_path / "in", {"a": jnp.ones(3)}, config)
    with pytest.raises(xla.StoreError, match=r"compressed-tensors, gptq.*got quant_method 'aqlm'"):
        xla.load_huggingface(tmp_path / "in")
    (tmp_path / "in" / "config.json").write_text(json.dumps({}))
    with pytest.raises(xla.StoreError, match="must have a quantization_config"):
        xla.load_huggingface(tmp_path / "in")
