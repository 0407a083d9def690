"""Folders of shards: written by one or by several processes, loaded onto any mesh."""

import concurrent.futures
import json
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import provider_xla as xla
from jaxtap_testkit.meshes import grid, line, put
from jaxtap_testkit.processes import run_python
from jaxtap_testkit.xla_samples import draw

UP, DOWN, X = draw((64, 128), (128, 64), (16, 64))
RULE = xla.QuantizationRule(weight_qtype="int4", tile_size=32)


def model(params, x):
    return jax.nn.relu(x @ params["up"]) @ params["down"]


def stored_on(mesh):
    params = {"up": put(mesh, UP, None, "b"), "down": put(mesh, DOWN, "b", "a")}
    plan = xla.PtqProvider(RULE).plan(model, params, X, kernels=False)
    tree = {**plan.quantize(params), "step": 7, "whole": np.arange(3)}
    return plan, tree


def assert_same(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_pieces_are_the_shards_and_load_onto_other_meshes(tmp_path):
    _, tree = stored_on(grid((2, 4), ("a", "b")))
    xla.save(tmp_path / "model", tree, format="shards")
    index = json.loads((tmp_path / "model" / "jaxtap.index.json").read_text())
    assert len(index["pieces"]["up.qvalue"]) == 4  # each column once, though on two devices
    assert len(index["pieces"]["down.qvalue"]) == 8
    assert_same(xla.load(tmp_path / "model"), tree)
    for mesh, spec in ((line(size=8), P("d")), (line(size=2), P(None, "d")), (line(), P())):
        place = NamedSharding(mesh, spec)

        def of(name, place=place):
            return place if name in ("up", "down") else None

        found = xla.load(tmp_path / "model", sharding=of)
        assert found["up"].qvalue.sharding.is_equivalent_to(place, 2)
        assert_same(found, tree)


def test_with_a_plan_and_what_is_beside(tmp_path):
    plan, tree = stored_on(grid((2, 4), ("a", "b"), AxisType.Auto))
    params = {name: tree[name] for name in ("up", "down")}
    xla.save(tmp_path / "model", params, plan, extra={"ranges": jnp.ones(3)}, format="shards")
    assert_same(xla.load(tmp_path / "model", plan=plan, prepack=False), params)
    np.testing.assert_array_equal(xla.load_extra(tmp_path / "model")["ranges"], np.ones(3))
    with pytest.raises(xla.StoreError, match="already exists"):
        xla.save(tmp_path / "model", params, plan, format="shards")


def test_every_damage_is_an_error(tmp_path):
    _, tree = stored_on(grid((2, 4), ("a", "b")))
    folder = tmp_path / "model"
    xla.save(folder, tree, format="shards")
    (file,) = folder.glob("shard-*")
    for path in (file, folder / "jaxtap.index.json"):
        whole = path.read_bytes()
        for place in (0, 9, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(xla.StoreError):
                xla.load(folder)
        path.write_bytes(whole[:-1])
        with pytest.raises(xla.StoreError):
            xla.load(folder)
        path.write_bytes(whole)
    assert_same(xla.load(folder), tree)
    file.unlink()
    with pytest.raises(xla.StoreError, match="is missing"):
        xla.load(folder)


SCRIPT = """
import sys, jax, numpy as np
number, count, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
jax.config.update("jax_num_cpu_devices", 8 // count)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", count, number)
import provider_xla as xla
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

def model(params, x):
    return jax.nn.relu(x @ params["up"]) @ params["down"]

def place(mesh, x, *spec):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(*spec)), lambda i: x[i])

arrays = np.load(folder + "/float.npz")
rule = xla.QuantizationRule(weight_qtype="int4", tile_size=32)
mesh = jax.make_mesh((2, 4), ("a", "b"), (AxisType.Auto,) * 2)
params = {"up": place(mesh, arrays["up"], None, "b"), "down": place(mesh, arrays["down"], "b", "a")}
plan = xla.PtqProvider(rule).plan(model, params, arrays["x"], kernels=False)
stored = plan.quantize(params)
assert not stored["up"].qvalue.is_fully_addressable
xla.save(folder + "/model", stored, plan)
try:
    xla.save(folder + "/model", stored, plan)
except xla.StoreError as error:
    # Process 0 finds out, and all of them raise.
    assert "already exists" in str(error), error
else:
    raise AssertionError("saved twice")
try:
    xla.save(folder + "/one.safetensors", stored, plan)
except xla.StoreError as error:
    assert "several processes" in str(error), error
else:
    raise AssertionError("saved in one file")
xla.save(folder + "/model", stored, plan, overwrite=True)

other = jax.make_mesh((8,), ("d",), (AxisType.Auto,))
loaded = xla.load(
    folder + "/model", plan=plan, sharding=NamedSharding(other, P("d")), prepack=False
)
alone = plan.quantize({name: jax.device_put(arrays[name]) for name in stored})
for name in stored:
    assert loaded[name].qvalue.sharding.spec == P("d")
    wanted = np.asarray(alone[name].qvalue)
    for array in (stored[name].qvalue, loaded[name].qvalue):
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), wanted[shard.index])
y = jax.jit(plan.apply(model))(loaded, arrays["x"])
y = jax.jit(lambda y: y, out_shardings=NamedSharding(other, P()))(y)
np.save(f"{folder}/result-{number}.npy", np.asarray(y))
"""


@pytest.mark.slow
def test_processes_save_and_load_together(tmp_path):
    count = 2
    np.savez(tmp_path / "float.npz", up=UP, down=DOWN, x=X)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    def run(number):
        return run_python("-c", SCRIPT, number, count, port, tmp_path, strict=False)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(run, range(count)))
    names = sorted(file.name for file in (tmp_path / "model").iterdir())
    shards = [f"shard-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    assert names == ["jaxtap.index.json", *shards]
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]
    # In this process, on one device, with the same values and the same result.
    plan, tree = stored_on(grid((2, 4), ("a", "b")))
    alone = xla.load(tmp_path / "model", prepack=False)
    assert_same(alone, {name: tree[name] for name in ("up", "down")})
    wanted = np.asarray(plan.apply(model)(alone, X))
    for number in range(count):
        found = np.load(tmp_path / f"result-{number}.npy")
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
