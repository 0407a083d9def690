"""GGUF files: compared with the gguf package's own numbers and bytes."""

import struct

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
import quant_numerics as qn
from jaxtap_testkit.gguf_samples import HALVES, KINDS, TABLES, blocks
from jaxtap_testkit.store_samples import same

WRITTEN = KINDS[:5]


def write(path, tensors, options=None, **keys):
    """Write a file with the gguf package: tensors by name, as (data, type or None)."""
    writer = gguf.GGUFWriter(path, "llama", **(options or {}))
    for add, (key, value) in keys.items():
        getattr(writer, f"add_{add}")(key, value)
    for name, (data, kind) in tensors.items():
        raw = None if kind is None else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors_in(path):
    return {t.name: (t.tensor_type.name, t.data) for t in gguf.GGUFReader(path).tensors}


def floats(leaf):
    return np.asarray(
        qn.dequantize(leaf)
        if hasattr(leaf, "qtype") and not hasattr(leaf, "shift")
        else leaf.restore()
    )


@pytest.fixture
def model_file(tmp_path):
    """A file with a tensor of each type."""
    rng = np.random.default_rng(1)
    tensors = {f"{kind}.weight": (blocks(kind), kind) for kind in KINDS}
    for name, dtype in {"norm": "float32", "half": "float16", "wide": "float64"}.items():
        tensors[name] = rng.normal(size=(4, 5)).astype(dtype), None
    tensors |= {f"int{n}": (np.arange(6, dtype=f"int{n}"), None) for n in (8, 16, 32, 64)}
    short = rng.normal(size=(4, 6)).astype(jnp.bfloat16).view(np.uint8)
    tensors["short"] = short, "BF16"
    path = tmp_path / "model.gguf"
    write(
        path,
        tensors,
        uint32=("llama.block_count", 2),
        float32=("llama.rope.freq_base", 1e4),
        bool=("general.flag", True),
        array=("tokenizer.ggml.tokens", ["a", "ß", ""]),
        uint64=("general.count", 2**40),
    )
    return path


def test_every_type_stands_for_the_same_numbers(model_file):
    tree = xla.load_gguf(model_file)
    for name, (kind, data) in tensors_in(model_file).items():
        if kind not in KINDS:
            assert np.asarray(tree[name]).tobytes() == data.tobytes(), name
            continue
        wanted = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
        np.testing.assert_array_equal(floats(tree[name]), wanted, err_msg=name)
        assert isinstance(tree[name], xla.AffineWeight) == (len(HALVES[kind]) == 2), name


@pytest.mark.parametrize("kind", TABLES)
def test_vectors_of_a_table_become_floats(tmp_path, kind):
    path = tmp_path / "model.gguf"
    write(path, {"a.weight": (blocks(kind), kind)})
    with pytest.warns(xla.QuantizationWarning, match=r"1 tensors of .* are float now, a.weight"):
        found = xla.load_gguf(path)["a.weight"]
    ((_, data),) = tensors_in(path).values()
    wanted = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(found, wanted)


def test_round_trip_of_a_file(model_file, tmp_path):
    """What is written is what was read, bit for bit, types of keys included."""
    read_alone = tuple(f"{kind}.weight" for kind in KINDS if kind not in WRITTEN)
    tree = {n: v for n, v in xla.load_gguf(model_file).items() if n not in read_alone}
    metadata = xla.read_gguf_metadata(model_file)
    assert metadata["llama.block_count"] == np.uint32(2)
    assert metadata["tokenizer.ggml.tokens"] == ["a", "ß", ""]
    xla.save_gguf(tmp_path / "again.gguf", tree, metadata=metadata)
    before, after = tensors_in(model_file), tensors_in(tmp_path / "again.gguf")
    assert after.keys() == tree.keys()
    for name, (kind, data) in after.items():
        assert (kind, data.tobytes()) == (before[name][0], before[name][1].tobytes()), name
    again = xla.read_gguf_metadata(tmp_path / "again.gguf")
    assert again == metadata
    assert {k: type(v) for k, v in again.items()} == {k: type(v) for k, v in metadata.items()}
    same(xla.load_gguf(tmp_path / "again.gguf"), tree)


def fn(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["up"]) @ layer["down"]
    return x * params["norm"]


def parameters(seed=0):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) / 8, jnp.float32)

    layers = [{"up": draw(64, 96), "down": draw(96, 64)} for _ in range(2)]
    return {"layers": layers, "norm": draw(64)}


def target(name):
    if name == "norm":
        return "output_norm.weight"
    _, i, part = name.split(".")
    return xla.Target(f"blk.{i}.ffn_{part}.weight", lambda w: w.T)


def source(name):
    found = target(name)
    return found if isinstance(found, str) else xla.Source(found.name, transform=lambda w: w.T)


X = jnp.asarray(np.random.default_rng(5).normal(size=(3, 64)), jnp.float32)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("qtype", "kind"), [("int8", "Q8_0"), ("int4", "Q4_0"), ("int5", "Q5_0")])
def test_a_quantized_model_goes_out_and_comes_back(tmp_path, qtype, kind):
    params, path = parameters(), tmp_path / "model.gguf"
    rule = xla.QuantizationRule(weight_qtype=qtype, tile_size=32, scale_dtype="float16")
    plan = xla.PtqProvider(rule).plan(fn, params, X)
    stored = plan.quantize(params)
    xla.save_gguf(path, stored, names=target, metadata={"general.architecture": "llama"})
    found = tensors_in(path)
    kinds = {name: kind for name, (kind, _) in found.items()}
    assert kinds.pop("output_norm.weight") == "F32"
    assert set(kinds.values()) == {kind}
    up = gguf.quants.dequantize(found["blk.1.ffn_up.weight"][1], gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(up.T, floats(stored["layers"][1]["up"]))
    loaded = xla.load_gguf(path, like=plan.params, names=source)
    same(loaded, stored)
    again = xla.PtqProvider(xla.rules_of(loaded)).plan(fn, params, X)
    assert [(w.qtype, w.granularity, w.scale_dtype) for w in again.weights.values()] == [
        (w.qtype, w.granularity, w.scale_dtype) for w in plan.weights.values()
    ]


@pytest.mark.slow
def test_tiles_of_several_blocks_are_written_block_by_block(tmp_path):
    w = parameters()["layers"][0]["up"].T
    q = qn.quantize(w, "int8", channel_axes=(0,), scale_dtype="float16")
    xla.save_gguf(tmp_path / "a.gguf", {"w": q})
    ((kind, data),) = tensors_in(tmp_path / "a.gguf").values()
    wanted = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(wanted, floats(q))


def affine(shape, seed=0, group=32):
    """A weight with minima, and the float64 array that it stands for."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-8, 8, shape).astype(np.int8)
    counts = (*shape[:-1], shape[-1] // group)
    scale, least = (rng.normal(size=counts).astype(np.float16) for _ in range(2))
    q = qn.qarray(jnp.asarray(values).astype(jnp.int4), jnp.asarray(scale), "int4", "float32")
    wide = [np.repeat(x.astype(np.float64), group, -1) for x in (scale, least)]
    return xla.AffineWeight(q, jnp.asarray(least), 8), (values + 8.0) * wide[0] + wide[1]


PROGRAMS = {
    "matmul": (lambda w, x: x @ w.T, (48, 64), (3, 64)),
    "einsum": (lambda w, x: jnp.einsum("bsk,hdk->bshd", x, w), (4, 8, 64), (2, 3, 64)),
    "left": (lambda w, x: w @ x, (48, 64), (64, 5)),
    "rows": (lambda w, x: x @ w[8:24].T, (48, 64), (3, 64)),
    "scan": (
        lambda w, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w.T), None), x, w)[0],
        (3, 64, 64),
        (2, 64),
    ),
    "vmap": (lambda w, x: jax.vmap(lambda w, x: x @ w.T)(w, x), (3, 16, 64), (3, 2, 64)),
    "tied": (lambda w, x: jnp.tanh(w[jnp.argsort(x[0])[:5]]) @ w.T, (64, 64), (1, 64)),
    "other axis": (lambda w, x: x @ w, (48, 64), (3, 48)),
    "squares": (lambda w, x: x @ w.T + (w * w).sum(1), (48, 64), (3, 64)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_contractions_with_a_minimum(name):
    program, shape, x_shape = PROGRAMS[name]
    held, exact = affine(shape)
    x = np.random.default_rng(7).normal(size=x_shape).astype(np.float32)
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    plan = xla.PtqProvider(xla.rules_of(held)).plan(program, like, x)
    wanted = np.asarray(program(jnp.asarray(exact, jnp.float32), x))
    found = jax.jit(plan.apply(program))(held, x)
    assert np.linalg.norm(found - wanted) <= 2e-6 * np.linalg.norm(wanted) + 1e-6


@pytest.mark.slow
def test_activations_in_int8_and_gradients():
    held, exact = affine((48, 64))
    x = jnp.asarray(np.random.default_rng(7).normal(size=(8, 64)), jnp.float32)
    program = PROGRAMS["matmul"][0]
    rules = xla.rules_of(held, act_qtype="int8")
    plan = xla.PtqProvider(rules).plan(program, jax.ShapeDtypeStruct((48, 64), "float32"), x)
    run = jax.jit(plan.apply(program))
    wanted = np.asarray(x, np.float64) @ exact.T
    assert np.linalg.norm(run(held, x) - wanted) < 0.02 * np.linalg.norm(wanted)
    grad = jax.grad(lambda x: run(held, x).sum())(x)
    np.testing.assert_allclose(grad, np.broadcast_to(exact.sum(0), x.shape), rtol=1e-4, atol=1e-3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["a.safetensors", "folder"])
def test_what_was_read_is_saved(tmp_path, model_file, name):
    tree = xla.load_gguf(model_file)
    xla.save(tmp_path / name, tree)
    same(xla.load(tmp_path / name), tree)


W = jnp.asarray(np.random.default_rng(3).normal(size=(8, 64)), jnp.float32)


def quantized(qtype, tile=32, scale="float16", **options):
    return qn.quantize(
        W, qtype, channel_axes=(0,), tile_axes={1: tile}, scale_dtype=scale, **options
    )


REFUSED = {
    "int3": (lambda: quantized("int3"), "w as w must be of int8 .Q8_0., int4 .Q4_0., int5"),
    "nf4": (lambda: quantized("nf4"), "got nf4"),
    "zero points": (lambda: quantized("int4", method="minmax"), "must have no zero points"),
    "tiles": (lambda: quantized("int4", tile=16), "must have tiles of 32 numbers"),
    "scales": (lambda: quantized("int4", scale="float32"), "scales that float16 has"),
    "axes": (lambda: jnp.ones((1,) * 5), "must have 1 to 4 axes"),
    "scalar": (lambda: jnp.ones(()), "must have 1 to 4 axes"),
    "dtype": (lambda: jnp.ones(3, bool), "must be of float32, .* got bool"),
    "text": (lambda: "hello", "must be an array"),
    "in, out": (lambda: quantized("int4").T, "transpose it by a Target"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_gguf_has_not_is_said_and_nothing_is_written(tmp_path, name):
    make, message = REFUSED[name]
    tree = {"a": jnp.ones(4), "w": make()}
    with pytest.raises(xla.StoreError, match=message):
        xla.save_gguf(tmp_path / "a.gguf", tree)
    assert list(tmp_path.iterdir()) == []


def test_names_and_keys_that_do_not_fit(tmp_path):
    path, tree = tmp_path / "a.gguf", {"w": W}
    cases = [
        ({"names": {"w": "n" * 64}}, "of a name of 1 to 63 bytes"),
        ({"names": lambda _: 3}, "must give a name, a Target"),
        ({"names": lambda _: xla.Target("w", lambda w: w.nothing)}, "transform that raised"),
        ({"names": lambda _: [xla.Target("w"), xla.Target("w")]}, "must be one tensor"),
        ({"metadata": {"key": object()}}, "key must be text, a number"),
        ({"metadata": {"key": []}}, "key must be text, a number|isn't empty"),
        ({"metadata": {"key": [1, "a"]}}, "must be a list of one type"),
        ({"metadata": {"general.alignment": 3}}, "can't be written"),
    ]
    for options, message in cases:
        with pytest.raises(xla.StoreError, match=message):
            xla.save_gguf(path, tree, **options)
        assert list(tmp_path.iterdir()) == []
    xla.save_gguf(path, tree)
    with pytest.raises(xla.StoreError, match="already exists"):
        xla.save_gguf(path, tree)
    xla.save_gguf(path, tree, overwrite=True)


def test_files_that_do_not_fit(tmp_path, model_file):
    like = {"w": jax.ShapeDtypeStruct((64, 6), jnp.float32)}
    cases = [
        ({"like": like}, r"w must be made of tensors of .*, got w: the nearest"),
        (
            {"like": like, "names": {"w": "Q4_0.weight"}},
            r"must be \[64, 6\], got \[6, 64\]. It is the",
        ),
        ({"like": like, "names": {"w": xla.Source("Q4_0.weight", transform=len)}}, "w, of Q4_0"),
        ({"names": {"w": "a"}}, "Give both"),
    ]
    for options, message in cases:
        with pytest.raises(xla.StoreError, match=message):
            xla.load_gguf(model_file, **options)
    narrow = {"norm": jax.ShapeDtypeStruct((4, 5), jnp.float16)}
    with pytest.raises(xla.StoreError, match="must be float16 or narrower, got float32"):
        xla.load_gguf(model_file, like=narrow)
    wide = {"half": jax.ShapeDtypeStruct((4, 5), jnp.float32)}
    assert xla.load_gguf(model_file, like=wide)["half"].dtype == jnp.float32
    write(tmp_path / "tq.gguf", {"w": (np.full((2, 66), 3, np.uint8), "TQ2_0")})
    with pytest.raises(xla.StoreError, match=r"w of .* must be whole TQ2_0: its numbers must"):
        xla.load_gguf(tmp_path / "tq.gguf")
    write(tmp_path / "iq.gguf", {"w": (np.zeros((2, 18), np.uint8), "Q1_0")})
    with pytest.raises(xla.StoreError, match=r"w of .* must be of a type that is read .* got Q1_0"):
        xla.load_gguf(tmp_path / "iq.gguf")


def test_files_that_were_cut(tmp_path, model_file):
    with pytest.raises(xla.StoreError, match="got none there"):
        xla.load_gguf(tmp_path / "nothing.gguf")
    data = model_file.read_bytes()
    for size in (0, 3, 4, 10, 30, 60, 200, 1000, len(data) // 2, len(data) - 64):
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(xla.StoreError, match="must be a whole GGUF file"):
            xla.load_gguf(tmp_path / "cut.gguf")


PLAIN = {"a": "float32", "b": "float16", "c": "int16", "d": "float64", "e": "int8"}


def plain_tensors():
    shapes = {"a": (3, 4), "b": (2,), "c": (5, 1), "d": (4,), "e": (2, 2, 2)}
    return {
        name: np.arange(np.prod(shapes[name]), dtype=dtype).reshape(shapes[name]) * 3
        for name, dtype in PLAIN.items()
    }


@pytest.fixture
def parts(tmp_path):
    """Return the three files of a split one, of two tensors each but the last."""
    tensors = {name: (array, None) for name, array in plain_tensors().items()}
    options = {"split_max_tensors": 2}
    write(tmp_path / "m.gguf", tensors, options, uint32=("llama.block_count", 2))
    return sorted(tmp_path.glob("*.gguf"))


@pytest.mark.parametrize("order", ["LITTLE", "BIG"])
def test_every_part_of_a_split_file_and_every_byte_order(tmp_path, order):
    tensors = {name: (array, None) for name, array in plain_tensors().items()}
    options = {"split_max_tensors": 2, "endianess": gguf.GGUFEndian[order]}
    write(tmp_path / "m.gguf", tensors, options, uint32=("llama.block_count", 2))
    files = sorted(tmp_path.glob("*.gguf"))
    assert [file.name[:7] for file in files] == ["m-00001", "m-00002", "m-00003"]
    for file in files:
        tree = xla.load_gguf(file)
        assert tree.keys() == PLAIN.keys()
        for name, array in plain_tensors().items():
            np.testing.assert_array_equal(tree[name], array, strict=True)
        metadata = xla.read_gguf_metadata(file)
        assert metadata == {"general.architecture": "llama", "llama.block_count": np.uint32(2)}
    # What was read from parts is written whole.
    xla.save_gguf(tmp_path / "whole.gguf", tree, metadata=metadata)
    same(xla.load_gguf(tmp_path / "whole.gguf"), tree)


def test_parts_that_are_missing_or_not_those_of_their_names(parts):
    first, second, third = parts
    whole, cut = second.read_bytes(), second.read_bytes()[:200]
    cases = [
        (None, r"is one of 3 parts, .* got no m-00002-of-00003.gguf. Fetch it"),
        (third.read_bytes(), r"m-00002.* must say that it is part 2 of 3, got split.no=2"),
        (cut, r"m-00002-of-00003.gguf must be a whole GGUF file"),
    ]
    for data, message in cases:
        second.unlink() if data is None else second.write_bytes(data)
        for given in {first, second, third} if data else {first, third}:
            with pytest.raises(xla.StoreError, match=message):
                xla.load_gguf(given)
    second.write_bytes(whole)
    alone = first.with_name("alone.gguf")
    alone.write_bytes(whole)
    with pytest.raises(xla.StoreError, match=r"must be named as the part .* split.count=3"):
        xla.load_gguf(alone)
    with pytest.raises(xla.StoreError, match=r"got none there. Give m-00001"):
        xla.load_gguf(first.with_name("m.gguf"))
    unsaid = first.with_name("n-00001-of-00002.gguf")
    write(unsaid, {"a": (np.ones(3, "f"), None)})
    with pytest.raises(xla.StoreError, match=r"split.count=None. Give the parts their names back"):
        xla.load_gguf(unsaid)
    # A part of another split file, of the same number.
    names = {name: (np.ones(3, "f"), None) for name in "acxyz"}
    write(first.with_name("o.gguf"), names, {"split_max_tensors": 2})
    first.with_name("o-00001-of-00003.gguf").replace(first)
    with pytest.raises(xla.StoreError, match=r"5 tensors of different names, got 5 .4 names"):
        xla.load_gguf(first)


def test_big_endian_blocks_are_refused(tmp_path):
    tensors = {"norm": (np.ones(4, "f"), None), "w": (blocks("Q8_0"), "Q8_0")}
    write(tmp_path / "big.gguf", tensors, {"endianess": gguf.GGUFEndian.BIG})
    with pytest.raises(xla.StoreError, match=r"w of .*float32.* from a big-endian file, got Q8_0"):
        xla.load_gguf(tmp_path / "big.gguf")
    like = {"norm": jax.ShapeDtypeStruct((4,), jnp.float32)}
    np.testing.assert_array_equal(xla.load_gguf(tmp_path / "big.gguf", like=like)["norm"], 1)


def test_keys_of_a_part_are_not_written(tmp_path):
    for key in ("split.no", "split.count", "split.tensors.count"):
        with pytest.raises(xla.StoreError, match=f"no keys of a part of a split file, got {key}"):
            xla.save_gguf(tmp_path / "a.gguf", {"w": W}, metadata={key: 1})
    assert list(tmp_path.iterdir()) == []


def test_lists_of_nothing_and_of_lists(tmp_path):
    def text(name):
        return struct.pack("<Q", len(name)) + name

    def file(*values):
        keys = [text(f"key{i}".encode()) + value for i, value in enumerate(values)]
        header = b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys))
        (tmp_path / "a.gguf").write_bytes(header + b"".join(keys))
        return tmp_path / "a.gguf"

    def of(kind, items, count):
        return struct.pack("<IIQ", 9, kind, count) + items

    found = xla.read_gguf_metadata(file(of(8, b"", 0), of(6, b"", 0), of(8, text(b"a"), 1)))
    assert found["key0"] == []
    assert found["key2"] == ["a"]
    assert found["key1"].dtype == np.float32
    assert found["key1"].shape == (0,)
    for inner in (struct.pack("<IQ", 4, 0), struct.pack("<IQI", 4, 1, 7)):
        with pytest.raises(xla.StoreError, match=r"key0 of .* can't be read: a list of lists"):
            xla.read_gguf_metadata(file(of(9, inner * 2, 2)))
    deep = struct.pack("<IQ", 9, 1) * 20000
    with pytest.raises(xla.StoreError, match="must be a whole GGUF file"):
        xla.read_gguf_metadata(file(of(9, deep, 1)))


def test_tensors_share_no_bytes(tmp_path):
    def file(*offsets):
        header = b"GGUF" + struct.pack("<IQQ", 3, len(offsets), 0)
        for i, offset in enumerate(offsets):
            header += struct.pack("<Q1sIQIQ", 1, b"abc"[i : i + 1], 1, 8, 0, offset)
        data = np.arange(32, dtype=np.float32).tobytes()
        (tmp_path / "a.gguf").write_bytes(header + b"\0" * (-len(header) % 32) + data)
        return tmp_path / "a.gguf"

    found = xla.load_gguf(file(64, 0))
    np.testing.assert_array_equal(found["a"], np.arange(16, 24))
    np.testing.assert_array_equal(found["b"], np.arange(8))
    for offsets, message in (
        ((0, 16), "tensor b begins at byte .*, inside a"),
        # Offsets are of 64 bits: this one wraps around to the header's last bytes.
        ((2**64 - 4, 64), "tensor a begins at byte .*, inside the header"),
        ((0, 2**40), "it ends at byte"),
    ):
        with pytest.raises(xla.StoreError, match=message):
            xla.load_gguf(file(*offsets))
