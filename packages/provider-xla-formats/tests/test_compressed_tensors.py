"""compressed-tensors: checkpoints made by hand, after the format's description, and our own."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
import quant_numerics as qn
from jaxtap_testkit.huggingface_samples import FLOAT4, packed, write_folder
from jaxtap_testkit.store_samples import same
from provider_xla_formats.huggingface.method import pack_words, unpack_words

N, K = 24, 64


@pytest.mark.parametrize("bits", range(1, 9))
def test_words(bits):
    rng = np.random.default_rng(bits)
    low = -(2 ** (bits - 1))
    for n in (1, 7, 31, 32, 33, 100):
        values = rng.integers(low, -low, (3, n)).astype(np.int8)
        found = pack_words(values, bits)
        np.testing.assert_array_equal(found, packed(values, bits))
        np.testing.assert_array_equal(unpack_words(found, bits, n), values)
        with pytest.raises(ValueError, match="words, got"):
            unpack_words(found, bits, n + 32)


def checkpoint(folder, tensors, groups, form, parts=1, **config):
    """Write a checkpoint as vLLM has them."""
    quantization = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    quantization |= {"ignore": ["lm_head"], "quantization_status": "compressed"}
    found = {"architectures": ["LlamaForCausalLM"], "quantization_config": quantization, **config}
    write_folder(folder, tensors, found, parts)


def group(targets=("Linear",), **weights):
    return {"targets": list(targets), "weights": {"num_bits": 8, "type": "int", **weights}}


def draw(seed=0, low=-128, high=128, shape=(N, K)):
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int8)


def scales(*shape, dtype="bfloat16"):
    return np.random.default_rng(9).uniform(0.01, 0.1, shape).astype(jnp.dtype(dtype))


def wide(x, shape=(N, K)):
    """Scales, repeated to the shape of their weight, in float64."""
    x = np.asarray(x, np.float64)
    for axis, size in enumerate(shape):
        x = np.repeat(x, -(-size // x.shape[axis]), axis)[(slice(None),) * axis + (slice(size),)]
    return x


def int8_channel():
    values, scale = draw(), scales(N, 1)
    tensors = {"weight": values, "weight_scale": scale}
    config = group(strategy="channel", symmetric=True), "int-quantized"
    return tensors, config, values * wide(scale)


def int8_channel_with_zero_points():
    values, scale, points = draw(), scales(N, 1), draw(3, shape=(N, 1))
    tensors = {"weight": values, "weight_scale": scale, "weight_zero_point": points}
    config = group(strategy="channel", symmetric=False), "int-quantized"
    return tensors, config, (values.astype(float) - points) * wide(scale)


def int4_groups(bits=4, size=16):
    values, scale = draw(1, -(2 ** (bits - 1)), 2 ** (bits - 1)), scales(N, K // size)
    tensors = {
        "weight_packed": packed(values, bits),
        "weight_scale": scale,
        "weight_shape": np.asarray([N, K]),
        "weight_g_idx": (np.arange(K) // size).astype(np.int32),
    }
    args = {"num_bits": bits, "strategy": "group", "group_size": size, "symmetric": True}
    return tensors, (group(**args), "pack-quantized"), values * wide(scale)


def int4_groups_with_zero_points():
    tensors, (args, form), _ = int4_groups()
    values, points, scale = draw(1, -8, 8), draw(2, -8, 8, (N, 4)), tensors["weight_scale"]
    tensors["weight_zero_point"] = packed(points.T, 4).T
    args["weights"]["symmetric"] = False
    return tensors, (args, form), (values - wide(points)) * wide(scale)


def float8(strategy, *counts, **args):
    values = np.random.default_rng(0).normal(size=(N, K)).astype(jnp.float8_e4m3fn)
    scale = scales(*counts)
    config = group(type="float", strategy=strategy, **args), "float-quantized"
    shaped = scale if scale.ndim == 2 else scale.reshape(1, 1)
    per = wide(np.repeat(np.repeat(shaped, 16, 0), 32, 1)[:N, :K]) if args else wide(shaped)
    return {"weight": values, "weight_scale": scale}, config, values.astype(np.float64) * per


def blocks_of_floats(form, bits, size, scale, whole=None):
    """Values in bits, a scale for each block, and for nvfp4 what scales were multiplied with."""
    rng = np.random.default_rng(5)
    if bits == 4:
        codes = rng.integers(0, 16, (N, K))
        tensors = {"weight_packed": (codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8)}
        values = np.asarray(FLOAT4)[codes]
    else:
        tensors = {"weight": rng.normal(size=(N, K)).astype(jnp.float8_e4m3fn)}
        values = tensors["weight"].astype(np.float64)
    if whole is None:
        numbers = 2.0 ** (scale.astype(float) - 127)
    else:
        tensors["weight_global_scale"] = np.asarray([whole], np.float32)
        numbers = scale.astype(float) / whole
    args = {"num_bits": bits, "type": "float", "group_size": size, "symmetric": True}
    args["strategy"] = "group" if whole is None else "tensor_group"
    wanted = values * np.repeat(numbers, size, 1)
    return tensors | {"weight_scale": scale}, (group(**args), form), wanted


def exponents(size):
    return np.random.default_rng(6).integers(120, 130, (N, K // size)).astype(np.uint8)


def nvfp4():
    scale = np.random.default_rng(7).uniform(1, 400, (N, K // 16)).astype(jnp.float8_e4m3fn)
    return blocks_of_floats("nvfp4-pack-quantized", 4, 16, scale, 256.0)


CASES = {
    "nvfp4": nvfp4,
    "mxfp4": lambda: blocks_of_floats("mxfp4-pack-quantized", 4, 32, exponents(32)),
    "mxfp8": lambda: blocks_of_floats("mxfp8-quantized", 8, 32, exponents(32)),
    "int8 by row": int8_channel,
    "int8 with zero points": int8_channel_with_zero_points,
    "int4 groups": int4_groups,
    "int3 groups": lambda: int4_groups(3),
    "int8 groups": lambda: int4_groups(8, 32),
    "int4 groups with zero points": int4_groups_with_zero_points,
    "float8 by row": lambda: float8("channel", N, 1),
    "float8 by tensor": lambda: float8("tensor", 1),
    # 24 rows: the last block of rows is shorter.
    "float8 by block": lambda: float8("block", 2, 2, block_structure=[16, 32]),
}
NAME = "model.layers.0.mlp.up_proj"


@pytest.mark.sample(12)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_checkpoints_as_vllm_has_them(tmp_path, case, parts):
    tensors, (args, form), wanted = CASES[case]()
    norm, head = scales(K), scales(N, K)
    all_tensors = {f"{NAME}.{part}": x for part, x in tensors.items()}
    all_tensors |= {"model.norm.weight": norm, "lm_head.weight": head, f"{NAME}.bias": scales(N)}
    checkpoint(tmp_path / "in", all_tensors, {"group_0": args}, form, parts)
    tree = xla.load_huggingface(tmp_path / "in")
    assert tree.keys() == {f"{NAME}.weight", f"{NAME}.bias", "model.norm.weight", "lm_head.weight"}
    q = tree[f"{NAME}.weight"]
    assert q.dtype == jnp.bfloat16
    found = np.asarray(qn.dequantize(q.astype("float32")))
    # Of float32 contractions of bfloat16 scales.
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_array_equal(tree["lm_head.weight"], head)

    xla.save_compressed_tensors(
        tmp_path / "out",
        tree,
        config={"architectures": ["X"]},
        act_qtype="int8" if form == "int-quantized" else None,
    )
    same(xla.load_huggingface(tmp_path / "out"), tree)
    written = raw(tmp_path / "out")
    for name, array in all_tensors.items():
        if not name.endswith("g_idx"):
            assert written[name].tobytes() == array.tobytes(), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["X"]
    quantization = config["quantization_config"]
    assert quantization["format"] == form
    assert quantization["ignore"] == ["lm_head"]
    given, back = args["weights"], quantization["config_groups"]["group_0"]["weights"]
    assert {key: back[key] for key in given} == given
    assert quantization["config_groups"]["group_0"]["targets"] == [NAME]


def raw(folder):
    """The tensors of a checkpoint's file as they lie there."""
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__")
    return {
        name: np.frombuffer(
            data[start + about["data_offsets"][0] : start + about["data_offsets"][1]], np.uint8
        )
        for name, about in header.items()
    }


def fn(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["up"]) @ layer["down"]
    return x


RULES = {
    "int8": {"weight_qtype": "int8"},
    "w8a8": {"weight_qtype": "int8", "act_qtype": "int8"},
    "int4": {"weight_qtype": "int4", "tile_size": 16},
    "float8": {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"},
}


def up(name):
    return f"model.{name}_proj.weight"


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_a_quantized_model_goes_out_and_comes_back(tmp_path, name):
    rng = np.random.default_rng(0)
    layers = [
        {"up": rng.normal(size=(64, 96)), "down": rng.normal(size=(96, 64))} for _ in range(2)
    ]
    params = jax.tree.map(lambda x: jnp.asarray(x / 8, jnp.float32), {"layers": layers})
    x = jnp.asarray(rng.normal(size=(3, 64)), jnp.float32)
    rule = xla.QuantizationRule(**RULES[name])
    plan = xla.PtqProvider(rule).plan(fn, params, x)
    stored = plan.quantize(params)
    act_qtype = RULES[name].get("act_qtype")
    xla.save_compressed_tensors(
        tmp_path / "out",
        stored,
        names=lambda n: xla.Target(up(n), lambda w: w.T),
        act_qtype=act_qtype,
    )
    loaded = xla.load_huggingface(
        tmp_path / "out",
        like=plan.params,
        names=lambda n: xla.Source(up(n), transform=lambda w: w.T),
    )
    same(loaded, stored)
    again = xla.PtqProvider(xla.rules_of(loaded, act_qtype)).plan(fn, params, x)
    run = jax.jit(plan.apply(fn))
    np.testing.assert_array_equal(jax.jit(again.apply(fn))(loaded, x), run(stored, x))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (one,) = config["config_groups"].values()
    activations = one["input_activations"]
    assert (activations is None) == (act_qtype is None)
    if activations is not None:
        assert (activations["strategy"], activations["dynamic"]) == ("token", True)


def test_several_schemes_in_one_checkpoint(tmp_path):
    """Targets are names, patterns and classes, in this order."""
    int4, (four, _), wanted = int4_groups()
    int8, (eight, _), _ = int8_channel()
    tensors = {f"a.{part}": x for part, x in int4.items()}
    tensors |= {f"b.{part}": x for part, x in int8.items()}
    tensors |= {f"c.d.{part}": x for part, x in int4.items()}
    groups = {
        "group_0": eight | {"targets": ["Linear"], "format": "int-quantized"},
        "group_1": four | {"targets": ["a", r"re:c\..*"], "format": "pack-quantized"},
        "group_2": {"targets": ["kv"], "weights": None},
    }
    checkpoint(tmp_path / "in", tensors, groups, "mixed-precision")
    tree = xla.load_huggingface(tmp_path / "in", dtype="float32")
    assert {name: q.qtype for name, q in tree.items()} == {
        "a.weight": "int4",
        "b.weight": "int8",
        "c.d.weight": "int4",
    }
    np.testing.assert_allclose(qn.dequantize(tree["c.d.weight"]), wanted, rtol=1e-6)
    xla.save_compressed_tensors(tmp_path / "out", tree, act_qtype="int8")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    same(xla.load_huggingface(tmp_path / "out", dtype="float32"), tree)


def broken(change):
    tensors, (args, form), _ = int4_groups()
    change(tensors, args)
    return {f"{NAME}.{part}": x for part, x in tensors.items()}, {"group_0": args}, form


BROKEN = {
    "zero points that the scheme lacks": (
        lambda t, a: t.update(weight_zero_point=t["weight_packed"]),
        "it has zero points, which its scheme doesn't have",
    ),
    "no scheme": (lambda t, a: a.update(targets=["other.name"]), "must be among the targets"),
    "no shape": (
        lambda t, a: t.pop("weight_shape"),
        "of compressed-tensors as its config says: it lacks 'shape'",
    ),
    "no values": (lambda t, a: t.pop("weight_packed"), "it lacks 'packed'"),
    "other words": (lambda t, a: t.update(weight_packed=t["weight_packed"][:, 1:]), "words, got 7"),
    "other scales": (lambda t, a: t.update(weight_scale=scales(N, 3)), r"must be \[24, 4\]"),
    "other groups": (lambda t, a: a["weights"].update(group_size=24), "must divide its 64 columns"),
    "groups that aren't there": (
        lambda t, a: t.update(weight_g_idx=t["weight_g_idx"] + 1),
        r"64 numbers below 4 \(g_idx\)",
    ),
    "zero points": (lambda t, a: a["weights"].update(symmetric=False), "it lacks 'zero_point'"),
    "16 bits": (lambda t, a: a["weights"].update(num_bits=16), "must be int-quantized"),
    "odd bits": (lambda t, a: a["weights"].update(num_bits="four"), "can't be read"),
    "nvfp4 of integers": (
        lambda t, a: a.update(format="nvfp4-pack-quantized"),
        "must have 4-bit floats in groups of 16",
    ),
    "strategy": (lambda t, a: a["weights"].update(strategy="token"), "got token"),
    "no targets": (lambda t, a: a.pop("targets"), "can't be read"),
    "scales of bytes": (
        lambda t, a: t.update(weight_scale=t["weight_scale"].view("uint8")),
        "must be",
    ),
}


def test_classes_are_told_by_names(tmp_path):
    """A file doesn't say classes: what embeds is an Embedding."""
    int4, (four, form), _ = int4_groups()
    int8, (eight, _), _ = int8_channel()
    tensors = {f"model.embed_tokens.{part}": x for part, x in int8.items()}
    tensors |= {f"model.up.{part}": x for part, x in int4.items()}
    groups = {
        "a": eight | {"targets": ["Embedding"], "format": "int-quantized"},
        "b": four | {"targets": ["Linear"]},
    }
    checkpoint(tmp_path / "in", tensors, groups, form)
    tree = xla.load_huggingface(tmp_path / "in")
    assert {name: q.qtype for name, q in tree.items()} == {
        "model.embed_tokens.weight": "int8",
        "model.up.weight": "int4",
    }


def test_floats_that_are_not_quantized_yet(tmp_path):
    """As llm-compressor writes them before it compresses."""
    tensors, (args, form), _ = int8_channel()
    tensors["weight"] = tensors["weight"].astype(np.float32)
    named = {f"{NAME}.{part}": x for part, x in tensors.items()}
    checkpoint(tmp_path / "in", named, {"g": args}, form)
    with pytest.raises(xla.StoreError, match="its values must be int8, got float32"):
        xla.load_huggingface(tmp_path / "in")


@pytest.mark.parametrize(
    "more",
    [
        {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
    ],
)
def test_what_would_give_other_numbers_is_refused(tmp_path, more):
    tensors, groups, form = broken(lambda t, a: None)
    checkpoint(tmp_path / "in", tensors, groups, form)
    path = tmp_path / "in" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= more
    path.write_text(json.dumps(config))
    with pytest.raises(xla.StoreError, match=f"must have no {next(iter(more))}, which is not read"):
        xla.load_huggingface(tmp_path / "in")
    about = {"transform_config": {}, "sparsity_config": {"format": "dense"}}
    config["quantization_config"] |= about
    path.write_text(json.dumps(config))
    xla.load_huggingface(tmp_path / "in")


@pytest.mark.parametrize("case", BROKEN)
def test_checkpoints_that_do_not_fit(tmp_path, case):
    change, message = BROKEN[case]
    tensors, groups, form = broken(change)
    checkpoint(tmp_path / "in", tensors, groups, form)
    with pytest.raises(xla.StoreError, match=message):
        xla.load_huggingface(tmp_path / "in")


def test_folders_that_are_none(tmp_path):
    with pytest.raises(xla.StoreError, match="must be the config of a checkpoint"):
        xla.load_huggingface(tmp_path)
    config = tmp_path / "config.json"
    for text, message in (
        ("[]", "must be a JSON object"),
        ("{", "must be the config"),
        ("{}", "must have a quantization_config"),
        ('{"quantization_config": 3}', "must have a quantization_config"),
        ('{"quantization_config": {"quant_method": "hqq"}}', "got quant_method 'hqq'"),
    ):
        config.write_text(text)
        with pytest.raises(xla.StoreError, match=message):
            xla.load_huggingface(tmp_path)
    tensors, groups, form = broken(lambda t, a: None)
    checkpoint(tmp_path / "in", tensors, groups, form)
    file = tmp_path / "in" / "model.safetensors"
    data = file.read_bytes()
    for size in (0, 7, 100, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(xla.StoreError, match="is not a safetensors file, or was cut short"):
            xla.load_huggingface(tmp_path / "in")
    file.unlink()
    with pytest.raises(xla.StoreError, match="got neither"):
        xla.load_huggingface(tmp_path / "in")


W = jnp.asarray(np.random.default_rng(3).normal(size=(8, 64)), jnp.float32)
AFFINE = xla.AffineWeight(
    qn.quantize(W, "int4", channel_axes=(0,), tile_axes={1: 32}), jnp.ones((8, 2)), 8
)
REFUSED = {
    "nf4": ({"a.weight": qn.quantize(W, "nf4", channel_axes=(0,))}, "got nf4"),
    "minima": ({"a.weight": AFFINE}, "must have whole zero points"),
    "in, out": (
        {"a.weight": qn.quantize(W, "int8", channel_axes=(1,))},
        "that is .in, out. by a Target",
    ),
    "name": ({"a.kernel": qn.quantize(W, "int8")}, "whose name ends in .weight"),
    "complex": ({"a": jnp.ones(3, "complex64")}, "got complex64"),
    "text": ({"a": "hello"}, "must be an array"),
    "blocks": (
        {"a.weight": qn.quantize(W, "int4", tile_axes={0: 4, 1: 32})},
        "or, of floats, block",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_scheme_is_said_and_nothing_is_written(tmp_path, case):
    tree, message = REFUSED[case]
    with pytest.raises(xla.StoreError, match=message):
        xla.save_compressed_tensors(tmp_path / "out", {"norm.weight": W[0]} | tree)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there(tmp_path):
    tree = {"a.weight": qn.quantize(W, "int8", channel_axes=(0,))}
    xla.save_compressed_tensors(tmp_path / "out", tree)
    with pytest.raises(xla.StoreError, match="already exists"):
        xla.save_compressed_tensors(tmp_path / "out", tree)
    xla.save_compressed_tensors(tmp_path / "out", tree, overwrite=True)
    with pytest.raises(xla.StoreError, match="act_qtype must be"):
        xla.save_compressed_tensors(tmp_path / "again", tree, act_qtype="int4")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["int8 with zero points", "int4 groups with zero points"])
@pytest.mark.parametrize("act", [None, "int8"])
def test_zero_points_are_packed_for_kernels(tmp_path, case, act):
    tensors, (args, form), wanted = CASES[case]()
    checkpoint(tmp_path / "in", {f"{NAME}.{part}": x for part, x in tensors.items()}, {"g": args},
               form)  # fmt: skip
    q = xla.load_huggingface(tmp_path / "in", dtype="float32")[f"{NAME}.weight"]
    x = jnp.asarray(np.random.default_rng(4).normal(size=(5, K)), jnp.float32)
    like = jax.ShapeDtypeStruct(q.shape, q.dtype)
    plan = xla.PtqProvider(xla.rules_of(q, act_qtype=act)).plan(lambda w, x: x @ w.T, like, x)
    packed = plan.prepack(q)
    (choice,) = (one for record in plan.ops for one in record.kernels.values())
    assert isinstance(packed, xla.AffineWeight) == (choice.kernel is not None)
    exact = np.asarray(x, np.float64) @ wanted.T
    bound = 1e-5 if act is None else 0.02
    for held in (q, packed, plan.convert(packed)):
        found = jax.jit(plan.apply(lambda w, x: x @ w.T))(held, x)
        assert np.linalg.norm(found - exact) < bound * np.linalg.norm(exact)
    xla.save(tmp_path / "file.safetensors", packed)
    again = xla.load(tmp_path / "file.safetensors")
    np.testing.assert_allclose(again.restore(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_zero_points_of_experts():
    w, x = (np.random.default_rng(i).normal(size=s) for i, s in enumerate([(3, 32, 8), (6, 32)]))
    q = qn.quantize(jnp.asarray(w + 1, jnp.float32), "int8", channel_axes=(0, 2), method="minmax")
    sizes = jnp.asarray([2, 0, 4])

    def model(w, x):
        return jax.lax.ragged_dot(x, w, sizes)

    x = jnp.asarray(x, jnp.float32)
    like = jax.ShapeDtypeStruct(q.shape, q.dtype)
    plan = xla.PtqProvider(xla.rules_of(q)).plan(model, like, x)
    exact = np.asarray(q.restore(), np.float64)[[0, 0, 2, 2, 2, 2]]
    exact = np.einsum("mk,mkn->mn", np.asarray(x, np.float64), exact)
    for held in (q, plan.prepack(q)):
        np.testing.assert_allclose(jax.jit(plan.apply(model))(held, x), exact, rtol=1e-4, atol=1e-4)
