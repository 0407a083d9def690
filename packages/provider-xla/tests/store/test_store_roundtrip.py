"""What is saved is what is loaded, bit for bit, and any reader of safetensors reads the file."""

import collections
import dataclasses
import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

import provider_xla as xla
import quant_numerics as qn
from jaxtap_testkit import examples
from jaxtap_testkit.store_samples import (
    BITS,
    DTYPES,
    bits,
    mlp,
    mlp_params,
    mlp_plan,
    quantized,
    random_bits,
    same,
)

pytestmark = pytest.mark.sample(2)

QTYPES = sorted(qn.QTYPES)
FORMATS = ["file.safetensors", "folder"]


@pytest.fixture(params=FORMATS)
def path(request, tmp_path):
    return tmp_path / request.param


def round_trip(path, tree, **options):
    xla.save(path, tree)
    return xla.load(path, **options)


@pytest.mark.slow
def test_every_dtype(path):
    shapes = {"matrix": (3, 5), "even": (2, 8), "vector": (7,), "scalar": (), "none": (0, 3)}
    tree = {
        dtype: {name: jnp.asarray(random_bits(dtype, shape)) for name, shape in shapes.items()}
        for dtype in DTYPES
    }
    same(round_trip(path, tree), tree)


@pytest.mark.slow
def test_every_qtype(path):
    tree = {qtype: quantized(qtype, dtype="bfloat16") for qtype in QTYPES}
    tree["asymmetric"] = [quantized(f"int{n}", zero_point=True) for n in (2, 3, 4, 5, 8, 16)]
    same(round_trip(path, tree), tree)


@dataclasses.dataclass
class Point:
    x: object
    y: object


jax.tree_util.register_dataclass(Point, ["x", "y"], [])
Pair = collections.namedtuple("Pair", ["first", "second"])


def test_every_kind_of_leaf(path):
    statistics = qn.Statistics((1, 1), qn.MovingAverage(0.9), symmetric=False)
    statistics.observe(qn.Calibration(-jnp.ones((1, 1)), 2 * jnp.ones((1, 1))))
    history = qn.Statistics((2,), qn.AmaxHistory(3, "most_recent", margin=1))
    history.observe(qn.Calibration(None, jnp.array([2.0, 3.0])))
    tree = {
        "history": history,
        "calibration": qn.Calibration(None, jnp.ones((1, 1))),
        "statistics": statistics,
        "mean": qn.Statistics((1,)),
        "key": jax.random.key(3),
        "numpy": [np.arange(3.0), np.float64(0.1), np.arange(4, dtype=np.int64)],
        "python": (True, 3, -(2**70), 0.1, float("nan"), float("-inf"), 'a "text" é'),
        "nothing": [None, {}, (), [], {"inner": None}],
        4: {"a.b": jnp.ones(1), "a": {"b": jnp.zeros(2)}, ("x", 1): jnp.ones(3)},
        "same.names": {"scale": jnp.ones(4)},
        "same": {"names": quantized("int8")},
        "__metadata__": jnp.ones(5),
    }
    tree = {str(key) if key == 4 else key: value for key, value in tree.items()}
    key = tree["4"].pop(("x", 1))
    same(round_trip(path, tree), tree)
    tuples = {("x", 1): key, ("x", 2): key}
    xla.save(path, tuples, overwrite=True)
    same(xla.load(path), tuples)


def test_a_tree_that_is_one_leaf(path):
    same(round_trip(path, quantized("int4")), quantized("int4"))


@pytest.mark.sample(1)
def test_other_nodes_are_dicts_or_what_the_template_says(path):
    tree = Point(Pair(jnp.ones(2), 3), {"inner": quantized("nf4"), "fn": jnp.tanh})
    xla.save(path, tree)
    with pytest.raises(xla.StoreError, match=r"y\.fn of .* was a .*template="):
        xla.load(path)
    template = Point(Pair(jnp.zeros(2), 0), {"inner": jnp.zeros((3, 64, 6)), "fn": jnp.sin})
    loaded = xla.load(path, template=template)
    same(loaded, Point(tree.x, {**tree.y, "fn": jnp.sin}))
    xla.save(path, Point(tree.x, 1), overwrite=True)
    same(xla.load(path), {"x": {"first": jnp.ones(2), "second": 3}, "y": 1})


@pytest.mark.slow
def test_a_plan_gives_the_structure_and_the_parameters_run(path):
    params = mlp_params()
    plan = mlp_plan(params=params)
    stored = plan.quantize(params)
    ranges = {"head#lhs": qn.Calibration(None, jnp.full((1, 1), 3.0))}
    xla.save(path, stored, plan, extra=ranges)
    loaded = xla.load(path, plan=plan)
    same(loaded, stored)
    same(xla.load_extra(path), ranges)
    x = jnp.ones((2, 16))
    run = jax.jit(plan.apply(mlp))
    np.testing.assert_array_equal(run(loaded, x), run(stored, x))


def test_nothing_beside(path):
    xla.save(path, {"a": jnp.ones(1)})
    with pytest.raises(xla.StoreError, match="without their plan"):
        xla.read_manifest(path).rules()
    assert xla.load_extra(path) is None


def test_extra_in_the_structure_of_a_template(path):
    beside = Point(jnp.ones(2), jnp.zeros(1))
    xla.save(path, {"a": jnp.ones(1)}, extra=beside)
    same(xla.load_extra(path, template=Point(0, 0)), beside)
    with pytest.raises(xla.StoreError, match="z"):
        xla.load_extra(path, template={"x": 0, "z": 0})


def test_a_plan_made_for_another_argument(path):
    params = mlp_params()
    provider = xla.PtqProvider(xla.QuantizationRule(weight_qtype="int8"), params_argnum=1)
    plan = provider.plan(lambda x, params: mlp(params, x), params, jnp.ones((2, 16)))
    stored = plan.quantize(params)
    xla.save(path, stored, plan)
    same(xla.load(path, plan=mlp_plan(xla.QuantizationRule(weight_qtype="int8"))), stored)


leaves = st.one_of(
    st.builds(
        lambda dtype, shape, seed: jnp.asarray(random_bits(dtype, shape, seed)),
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        st.integers(0, 9),
    ),
    st.builds(quantized, st.sampled_from(QTYPES), seed=st.integers(0, 9)),
    st.integers(),
    st.floats(),
    st.text(),
    st.none(),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=3),
        st.dictionaries(st.integers(), inner, max_size=2),
    ),
    max_leaves=6,
)
SETTINGS = {"suppress_health_check": [HealthCheck.function_scoped_fixture]}


@examples(60, **SETTINGS)
@given(tree=trees)
@example(tree=jnp.asarray(-1, "int2"))
def test_any_tree_in_a_file(tmp_path, tree):
    path = tmp_path / "any.safetensors"
    xla.save(path, tree, overwrite=True)
    same(xla.load(path), tree)
    safetensors.numpy.load_file(path)


@examples(8, **SETTINGS)
@given(tree=trees)
def test_any_tree_in_a_checkpoint(tmp_path, tree):
    xla.save(tmp_path / "any", tree, overwrite=True)
    same(xla.load(tmp_path / "any"), tree)


def unpacked_by_hand(found, dtype, last):
    """The quantized values in bytes, one after the other, the first in the lowest bits."""
    n = BITS[dtype]
    flat = [(int(byte) >> (n * i)) % 2**n for byte in found.reshape(-1) for i in range(8 // n)]
    return np.array(flat, np.uint8).reshape(*found.shape[:-1], -1)[..., :last]


@pytest.mark.parametrize("dtype", sorted(BITS))
def test_qvalue_are_packed_as_documented(tmp_path, dtype):
    array = random_bits(dtype, (3, 7))
    xla.save(tmp_path / "a.safetensors", {"qvalue": jnp.asarray(array)})
    found = safetensors.numpy.load_file(tmp_path / "a.safetensors")["qvalue"]
    assert found.dtype == np.uint8
    assert found.shape == (3, -(-7 * BITS[dtype] // 8))
    qvalue = array.view(np.uint8) & (2 ** BITS[dtype] - 1)
    np.testing.assert_array_equal(unpacked_by_hand(found, dtype, 7), qvalue)


def test_any_reader_reads_the_other_dtypes(tmp_path):
    tree = {dtype: random_bits(dtype, (3, 4)) for dtype in DTYPES if dtype not in BITS}
    xla.save(tmp_path / "a.safetensors", tree)
    for dtype, found in safetensors.numpy.load_file(tmp_path / "a.safetensors").items():
        assert bits(found) == bits(tree[dtype])
        kept = {"complex64": "float32"}.get(dtype, "uint8" if dtype[:6] == "float8" else dtype)
        assert found.dtype.name == kept


def test_the_file_is_small(tmp_path):
    qvalue = {"w": jnp.asarray(random_bits("int4", (256, 256)))}
    for name, most in (("a.safetensors", 256 * 128 + 4096), ("a", 256 * 128 * 1.1 + 8192)):
        path = tmp_path / name
        xla.save(path, qvalue)
        files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
        assert sum(file.stat().st_size for file in files) < most


def test_tensors_are_aligned_and_the_header_is_canonical(tmp_path):
    path = tmp_path / "a.safetensors"
    xla.save(path, {"a": np.ones(3, np.int8), "b": np.ones(3, np.float64), "c": np.ones(1, "f4")})
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    manifest = header.pop("__metadata__")["jaxtap.manifest"]
    dense = {"sort_keys": True, "separators": (",", ":")}
    assert manifest == json.dumps(json.loads(manifest), **dense)
    sizes = {"I8": 1, "F32": 4, "F64": 8}
    assert all(t["data_offsets"][0] % sizes[t["dtype"]] == 0 for t in header.values())


def test_plain_orbax_reads_a_checkpoint(tmp_path):
    import orbax.checkpoint as ocp

    q = quantized("int4")
    xla.save(tmp_path / "a", {"w": q})
    with ocp.PyTreeCheckpointer() as checkpointer:
        as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
        how = {"w.qvalue": as_numpy, "w.scale": as_numpy}
        found = checkpointer.restore(tmp_path / "a" / "tensors", restore_args=how)
    np.testing.assert_array_equal(found["w.qvalue"], np.asarray(q.qvalue, np.int8))
    np.testing.assert_array_equal(found["w.scale"], q.scale)


@pytest.mark.slow
def test_the_manifest_says_what_is_inside(path):
    params = mlp_params()
    rule = xla.QtRule(weight_qtype="int4", tile_size=8, bwd_qtype="int8")
    plan = xla.QtProvider(rule).plan(mlp, params, jnp.ones((2, 16)))
    xla.save(path, plan.quantize(params), plan)
    manifest = xla.read_manifest(path)
    assert manifest.versions["jax"] == jax.__version__
    assert {"provider-xla", "quant-numerics"} < manifest.versions.keys()
    given = {"class": "QtRule", "weight_qtype": "int4", "tile_size": 8, "bwd_qtype": "int8"}
    assert manifest.plan["rules"] == [given]
    weight = manifest.plan["weights"]["layers.1.w"]
    assert weight["path"] == "args[0]['layers'][1]['w']"
    assert (weight["shape"], weight["qtype"], weight["method"]) == ([16, 16], "int4", "absmax")
    assert (weight["channel_axes"], weight["tile_axes"]) == ([1], {"0": 8})
    assert "layers.1.w  int4     [16, 16]  int4[16, 16], float32[2, 16]" in str(manifest)
    assert not manifest.diff(plan)
    assert manifest.rules() == [rule]
    again = xla.QtProvider(manifest.rules()).plan(mlp, params, jnp.ones((2, 16)))
    same(xla.load(path, plan=again), plan.quantize(params))


def test_64_bits(tmp_path):
    path = tmp_path / "a.safetensors"
    with jax.enable_x64(True):
        tree = {"x": jnp.asarray([0.1, 0.2], jnp.float64), "q": quantized("int8", dtype="float64")}
        xla.save(path, tree)
        same(xla.load(path), tree)
    with pytest.raises(xla.StoreError, match="jax_enable_x64"):
        xla.load(path)


def test_numpy_makes_parameters_of_64_bits(tmp_path):
    """JAX has none where x64 is off: plans, what is stored, and files have what programs get."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(16, 8)), "bias": rng.normal(size=8), "count": np.array(3)}
    params["up"] = rng.normal(size=(16, 16))  # stored as what is computed from it alone
    x = rng.normal(size=(4, 16))

    def model(params, x):
        x = jnp.dot(x, jnp.tanh(params["up"]))
        return jnp.dot(x, params["w"]) / params["count"].astype(x.dtype) + params["bias"]

    plan = xla.PtqProvider("int8").plan(model, params, x)
    stored = plan.quantize(params)
    dtypes = {name: np.dtype(one.dtype).name for name, one in stored.items()}
    floats = dict.fromkeys(("w", "bias", "up"), "float32")
    assert dtypes == {**floats, "count": "int32"}
    types = plan.quantized_types(params)
    assert [x.dtype for x in jax.tree.leaves(types)] == [x.dtype for x in jax.tree.leaves(stored)]
    xla.save(tmp_path / "params.safetensors", stored, plan)
    loaded = xla.load(tmp_path / "params.safetensors", plan=plan)
    exact = np.asarray(model({k: v.astype(np.float32) for k, v in params.items()}, x))
    worst = 0.02 * np.abs(exact).max()
    for held in (stored, loaded):
        np.testing.assert_allclose(plan.apply()(held, x), exact, atol=worst)
    with pytest.raises(xla.QuantizationError, match="made for f32"):
        plan.quantize({**params, "w": params["w"].astype(np.float16)})
