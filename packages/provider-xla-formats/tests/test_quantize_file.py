"""From float files to quantized parameters, a parameter at a time."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import provider_xla as xla
from jaxtap_testkit.processes import run_python
from jaxtap_testkit.store_samples import mlp, mlp_params, mlp_plan, same


def flat(params):
    """The tensors of ``mlp_params`` under the names that they have as parameters."""
    found = {"head": params["head"]}
    for i, layer in enumerate(params["layers"]):
        found |= {f"layers.{i}.{name}": array for name, array in layer.items()}
    return {name: np.asarray(array) for name, array in found.items()}


@pytest.fixture(scope="module")
def params():
    return mlp_params(depth=3)


@pytest.fixture(scope="module")
def plan(params):
    return mlp_plan(params=jax.eval_shape(lambda: params))


@pytest.fixture(scope="module")
def stored(plan, params):
    return plan.quantize(params)


@pytest.fixture
def source(tmp_path, params):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(flat(params), path)
    return path


@pytest.mark.slow
def test_names_as_they_are(source, plan, stored):
    for given in (source, str(source), source.parent, [source]):
        same(xla.quantize_file(plan, given), stored)


def test_written_at_once_as_saved(source, plan, stored, tmp_path):
    assert xla.quantize_file(plan, source, tmp_path / "a.safetensors") is None
    xla.save(tmp_path / "b.safetensors", stored, plan)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    xla.quantize_file(plan, source, tmp_path / "c")
    same(xla.load(tmp_path / "c", plan=plan), stored)
    with pytest.raises(xla.StoreError, match="overwrite=True"):
        xla.quantize_file(plan, source, tmp_path / "a.safetensors")
    xla.quantize_file(plan, source, tmp_path / "a.safetensors", overwrite=True)


def split(tmp_path, tensors, parts=3):
    """Files of a model in parts, with their index."""
    folder, index = tmp_path / "parts", {}
    folder.mkdir()
    for i in range(parts):
        name = f"model-{i + 1:05}-of-{parts:05}.safetensors"
        part = dict(list(tensors.items())[i::parts])
        safetensors.numpy.save_file(part, folder / name)
        index |= dict.fromkeys(part, name)
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def test_an_index_of_several_files(tmp_path, params, plan, stored):
    folder = split(tmp_path, flat(params))
    index = folder / "model.safetensors.index.json"
    for given in (folder, index, sorted(folder.glob("*.safetensors"))):
        same(xla.quantize_file(plan, given), stored)
    twice = folder / "twice.safetensors"
    safetensors.numpy.save_file({"head": flat(params)["head"]}, twice)
    with pytest.raises(xla.StoreError, match=r"head is in .* and in .*twice"):
        xla.quantize_file(plan, [*sorted(folder.glob("model-*")), twice])
    index.write_text(json.dumps({"weight_map": {"head": "../model.safetensors"}}))
    with pytest.raises(xla.StoreError, match="outside of its folder"):
        xla.quantize_file(plan, folder)
    for text in ("", "[]", '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(xla.StoreError, match="is not an index"):
            xla.quantize_file(plan, index)


def bert_like(params):
    """As PyTorch has it: [out, in], and one tensor for each part of a fused matrix."""
    tensors = {"cls.weight": np.asarray(params["head"]).T, "unused.position_ids": np.arange(3)}
    for i, layer in enumerate(params["layers"]):
        parts = np.split(np.asarray(layer["w"]), [5, 9], axis=1)
        for part, name in zip(parts, "qkv", strict=True):
            tensors[f"bert.{i}.{name}.weight"] = np.ascontiguousarray(part.T)
        tensors[f"bert.{i}.bias"] = np.asarray(layer["b"])
    return {name: np.ascontiguousarray(array) for name, array in tensors.items()}


def concatenated(*parts):
    return np.concatenate([part.T for part in parts], axis=1)


def bert_names(name):
    if name == "head":
        return xla.Source("cls.weight", transform=np.transpose)
    _, i, leaf = name.split(".")
    if leaf == "b":
        return f"bert.{i}.bias"
    return xla.Source(*(f"bert.{i}.{part}.weight" for part in "qkv"), transform=concatenated)


def test_transposed_and_put_together(tmp_path, params, plan, stored):
    path = tmp_path / "bert.safetensors"
    safetensors.numpy.save_file(bert_like(params), path)
    same(xla.quantize_file(plan, path, names=bert_names), stored)
    mapping = {name: bert_names(name) for name in flat(params)}
    same(xla.quantize_file(plan, path, names=mapping), stored)
    folder = split(tmp_path, bert_like(params), parts=4)  # the parts of a matrix in several files
    same(xla.quantize_file(plan, folder, names=bert_names), stored)


def test_layers_of_a_scan(tmp_path):
    params = {"w": jnp.stack([layer["w"] for layer in mlp_params(depth=4)["layers"]])}

    def model(params, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0]

    plan = xla.PtqProvider(xla.QuantizationRule(weight_qtype="int3")).plan(
        model, params, jnp.ones((2, 16))
    )
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({f"{i}": np.asarray(w) for i, w in enumerate(params["w"])}, path)
    stacked = xla.Source(*map(str, range(4)), transform=lambda *layers: np.stack(layers))
    same(xla.quantize_file(plan, path, names={"w": stacked}), plan.quantize(params))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrower_floats(tmp_path, params, plan, dtype):
    narrow = jax.tree.map(lambda x: x.astype(dtype), params)
    path = tmp_path / "narrow.safetensors"
    safetensors.numpy.save_file(flat(narrow), path)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    same(xla.quantize_file(plan, path), plan.quantize(wide))
    rule = xla.QuantizationRule(weight_qtype="int4")
    own = xla.PtqProvider(rule).plan(mlp, narrow, jnp.ones((2, 16), dtype))
    same(xla.quantize_file(own, path), own.quantize(narrow))


def test_what_is_no_array_is_the_plans(source, params):
    tree = {**params, "act": jnp.tanh, "eps": 1e-6}
    plan = xla.PtqProvider(xla.QuantizationRule(weight_qtype="int8")).plan(
        mlp, tree, jnp.ones((2, 16))
    )
    same(xla.quantize_file(plan, source), plan.quantize(tree))


def test_errors_name_the_parameter(source, plan, params, tmp_path):
    def fails(match, path=source, plan=plan, **options):
        with pytest.raises((xla.StoreError, ValueError), match=match):
            xla.quantize_file(plan, path, tmp_path / "target.safetensors", **options)

    fails(
        r"head must be made of tensors of .*, got cls\.weight: the nearest.*names=",
        names={"head": "cls.weight"},
    )
    fails(r"names has heads, and the plan has no such", names={"heads": "head"})
    fails(r"names has 3 for head", names={"head": 3})
    fails(
        "sharding has a leaf 'x'",
        sharding={"x": jax.sharding.SingleDeviceSharding(jax.devices()[0])},
    )
    fails(r"head, of layers.0.w, must be \[16, 6\], got \[16, 16\]",
          names={"head": "layers.0.w"})  # fmt: skip
    fails(
        "transform that raised ZeroDivisionError",
        names={"head": xla.Source("head", transform=lambda x: 1 / 0)},
    )
    fails("does not exist", path=tmp_path / "absent.safetensors")
    fails("neither model.safetensors.index.json nor", path=make(tmp_path / "empty"))
    with pytest.raises(ValueError, match="needs a transform"):
        xla.Source("a", "b")

    other = tmp_path / "other.safetensors"
    tensors = flat(params)
    safetensors.numpy.save_file({**tensors, "head": np.ascontiguousarray(tensors["head"].T)}, other)
    fails(r"head.*It is the transpose: Source\('head', transform=lambda w: w.T\)", path=other)
    wide = {**tensors, "head": tensors["head"].astype(np.float64)}
    safetensors.numpy.save_file(wide, other)
    fails("head, of head, must be float32 or narrower, got float64", path=other)
    safetensors.numpy.save_file({**tensors, "head": np.full((16, 6), np.nan, np.float32)}, other)
    fails("head.*not finite", path=other)
    data = source.read_bytes()
    for length in (0, 7, 100, len(data) - 1):
        other.write_bytes(data[:length])
        fails("other.safetensors is not a safetensors file, or was cut short", path=other)
    assert not (tmp_path / "target.safetensors").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def make(folder):
    folder.mkdir()
    return folder


def test_quantized_files_are_no_sources(tmp_path, plan):
    text = json.dumps({"head": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}).encode()
    path = tmp_path / "fp8.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"x")
    with pytest.raises(xla.StoreError, match=r"head in .* is F8_E4M3, which is not a float"):
        xla.quantize_file(plan, path, names=lambda name: "head")


MEMORY = """
import ctypes, gc, sys
import safetensors.numpy
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jaxtap_testkit.store_samples import mlp
import provider_xla as xla

DEPTH, WIDTH = 40, 512
MATRIX = WIDTH * WIDTH * 4
source, target = sys.argv[1:]
layer = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
         "b": jax.ShapeDtypeStruct((WIDTH,), jnp.float32)}
params = {"layers": [dict(layer) for _ in range(DEPTH)], "head": layer["w"]}
plan = xla.PtqProvider(xla.QuantizationRule(weight_qtype="int4", tile_size=64)).plan(
    mlp, params, jax.ShapeDtypeStruct((1, WIDTH), jnp.float32))
live = []


def names(name):
    return xla.Source(name, transform=measured)


def measured(array):
    live.append(sum(x.nbytes for x in jax.live_arrays() if x.dtype == jnp.float32 and x.ndim == 2
                    and x.shape[0] == WIDTH))
    return array


def memory(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024


# What is compiled, once for all.
del params["layers"][1:]
one = xla.PtqProvider(xla.QuantizationRule(weight_qtype="int4", tile_size=64)).plan(
    mlp, params, jax.ShapeDtypeStruct((1, WIDTH), jnp.float32))
xla.quantize_file(one, source, names=names)


def peak(run):
    live.clear()
    gc.collect()
    # What is free already would hide what is taken.
    getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: None)(0)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark starts here
    run()
    return (memory("VmHWM") - before) / MATRIX


for given in (None, target):
    most = peak(lambda: xla.quantize_file(plan, source, given, names=names))
    print(len(live), max(live) / MATRIX, most)
print(peak(lambda: safetensors.numpy.load_file(source)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures with /proc")
def test_the_float_model_is_never_held(tmp_path):
    """Of 41 matrices, a few at a time: none is alive in JAX when the next one is read."""
    depth, width = 40, 512
    rng = np.random.default_rng(0)
    tensors = {f"layers.{i}.w": rng.normal(size=(width, width)).astype("f4") for i in range(depth)}
    tensors |= {f"layers.{i}.b": np.zeros(width, "f4") for i in range(depth)}
    tensors["head"] = tensors["layers.0.w"]
    source, target = tmp_path / "float.safetensors", tmp_path / "quantized.safetensors"
    safetensors.numpy.save_file(tensors, source)
    del tensors
    run = run_python("-c", MEMORY, source, target, MALLOC_ARENA_MAX="1")
    returned, written, everything = run.stdout.strip().split("\n")
    for line in (returned, written):
        count, alive, _ = line.split()
        assert int(count) == 2 * depth + 1
        assert float(alive) == 0
    # In matrices of float32. What is returned are 41 of an eighth, with scales.
    assert float(everything) > depth
    assert float(returned.split()[2]) < depth / 2
    assert float(written.split()[2]) < depth / 3
    assert target.stat().st_size < source.stat().st_size / 6
    print(run.stdout)
