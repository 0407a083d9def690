"""Saved from one mesh of eight devices, loaded onto another: each device gets its part alone."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from store_samples import quantized, same

import provider_xla as xla

PROGRAM = """
import sys, tempfile
from pathlib import Path
sys.path.insert(0, HERE)
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from store_samples import mlp, mlp_params, quantized, same
import provider_xla as xla
import quant_numerics as qn

assert len(jax.devices()) == 8
folder = Path(tempfile.mkdtemp())
auto = (AxisType.Auto,) * 2
mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=auto)
other = jax.make_mesh((2, 4), ("a", "b"), axis_types=auto)

params = mlp_params(depth=1, width=64, out=32)
params["bits7"] = jnp.ones((8, 64))
params["small"] = jnp.ones(3)
model = lambda params, x: mlp(params, x) + x @ params["bits7"].T @ jnp.ones((8, 32))
plan = xla.PtqProvider(xla.QuantizationRule(weight_qtype="int4", tile_size=16)).plan(
    model, params, jnp.ones((2, 64)), kernels=False)
columns = NamedSharding(mesh, P(None, ("x", "y")))
placed = {**params, "head": jax.device_put(params["head"], columns)}
stored = plan.quantize(placed)
assert stored["head"].qvalue.sharding == columns
x = jnp.ones((2, 64))
run = jax.jit(plan.apply(model))
expected = run(stored, x)
tree = {**stored, "bits7": quantized("int7", (8, 64, 16))}

qtypes = "int2", "int4", "int7", "nf4", "float8_e5m2", "mxfp4", "nvfp4"
kinds = {qtype: quantized(qtype, (8, 128, 16)) for qtype in qtypes}

for path in (folder / "a.safetensors", folder / "a"):
    xla.save(path, stored, plan)
    # A function of names.
    cut = NamedSharding(other, P("b", "a"))
    loaded = xla.load(path, plan=plan, sharding=lambda name: cut if name == "head" else None)
    same(loaded, stored)
    head = loaded["head"]
    assert head.qvalue.sharding == cut
    assert head.scale.sharding == cut, head.scale.sharding  # four tiles on four devices
    for shard in head.qvalue.addressable_shards:
        assert shard.data.shape == (16, 16)
        np.testing.assert_array_equal(shard.data, np.asarray(stored["head"].qvalue)[shard.index])
    # What has no sharding goes with what has one.
    assert isinstance(loaded["small"].sharding, SingleDeviceSharding)
    np.testing.assert_allclose(run(loaded, x), expected, rtol=1e-5, atol=1e-4)
    # Eight cuts, and four tiles: scales are everywhere.
    along = NamedSharding(mesh, P(("x", "y")))
    loaded = xla.load(path, sharding={"head": along})
    same(loaded, stored)
    assert loaded["head"].qvalue.sharding == along
    assert loaded["head"].scale.sharding.is_fully_replicated, loaded["head"].scale.sharding
    # The shardings of what there is.
    exact = jax.tree.map(lambda leaf: leaf.sharding, stored)
    loaded = xla.load(path, sharding=exact)
    same(loaded, stored)
    assert [leaf.sharding for leaf in jax.tree.leaves(loaded)] == jax.tree.leaves(exact)
    # One for all, and one for a part of the tree.
    everywhere = NamedSharding(other, P())
    for given in (everywhere, {"layers": everywhere}):
        loaded = xla.load(path, sharding=given)
        same(loaded, stored)
        assert all(a.sharding == everywhere for a in jax.tree.leaves(loaded["layers"]))
    loaded = xla.load(path, plan=plan, sharding=lambda name: cut if name == "head" else everywhere)
    actual = run(loaded, jax.device_put(x, everywhere))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-4)
    try:
        xla.load(path, sharding=NamedSharding(mesh, P("x")))
    except xla.StoreError as error:
        assert "small of shape [3] can't be sharded" in str(error), error
    else:
        raise AssertionError("3 on 4 devices")

    # Of every format, along every axis.
    xla.save(path, kinds, overwrite=True)
    specs = P(None, ("a", "b")), P(None, None, "b"), P("a", "b", None)
    for spec in specs if path.suffix else specs[:1]:
        loaded = xla.load(path, sharding=NamedSharding(other, spec))
        same(loaded, kinds)
        for q in loaded.values():
            first = q.planes if isinstance(q, qn.PackedQArray) else q.qvalue
            parts = {str(shard.index) for shard in first.addressable_shards}
            # The 16 last codes of int3, int5, int6 and int7 are in 2 bytes, not in 4 parts.
            assert len(parts) > 1 or (isinstance(q, qn.PackedQArray) and spec[-1] == "b")

import safetensors.numpy
floats = {"head": np.asarray(params["head"]), "bits7": np.asarray(params["bits7"]),
          "small": np.asarray(params["small"]), "layers.0.w": np.asarray(params["layers"][0]["w"]),
          "layers.0.b": np.asarray(params["layers"][0]["b"])}
safetensors.numpy.save_file(floats, folder / "float.safetensors")
made = xla.quantize_file(plan, folder / "float.safetensors",
                         sharding=lambda name: columns if name == "head" else None)
same(made, stored)
assert made["head"].qvalue.sharding == columns
xla.quantize_file(plan, folder / "float.safetensors", folder / "b.safetensors",
                  sharding=lambda name: columns if name == "head" else None)
same(xla.load(folder / "b.safetensors"), stored)
print("done")
"""


def test_on_eight_devices():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"HERE = {str(Path(__file__).parent)!r}\n{PROGRAM}"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "XLA_FLAGS": flags},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "done"


@pytest.mark.parametrize("name", ["a.safetensors", "a"])
def test_what_sharding_may_be(tmp_path, name):
    tree = {
        "w": quantized("int4"),
        "numpy": [__import__("numpy").ones(4)],
        "key": jax.random.key(0),
    }
    xla.save(tmp_path / name, tree)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    one = SingleDeviceSharding(jax.devices()[0])
    placed = {**tree, "numpy": [jnp.ones(4)]}
    with jax.enable_x64(True):
        for given in (one, NamedSharding(mesh, PartitionSpec()), lambda name: one):
            loaded = xla.load(tmp_path / name, sharding=given)
            assert isinstance(loaded["numpy"][0], jax.Array)
            same({**loaded, "numpy": []}, {**placed, "numpy": []})
    with pytest.raises(xla.StoreError, match=r"sharding\('w'\) returned 'd'"):
        xla.load(tmp_path / name, sharding=lambda name: "d" if name == "w" else None)
    with pytest.raises(xla.StoreError, match=r"sharding has 3 for w"):
        xla.load(tmp_path / name, sharding={"w": 3})
    with pytest.raises(xla.StoreError, match=r"sharding has a leaf 'v'.*numpy\.0"):
        xla.load(tmp_path / name, sharding={"v": one})
