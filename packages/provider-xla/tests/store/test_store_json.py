"""Sealed but malformed manifests, plans and rules raise StoreErrors, all of them."""

import contextlib
import copy
import json
import shutil
import struct
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import provider_xla as xla
from jaxtap_testkit import examples
from jaxtap_testkit.store_samples import quantized
from jaxtap_testkit.xla_samples import draw
from provider_xla.store.manifest import Manifest
from provider_xla.store.schema import BLANK, canonical, seal

(W, X) = draw((64, 32), (4, 64))
RULES = [xla.QuantizationRule(weight_qtype="int8", tile_size=32)]


def model(params, x):
    return x @ params["w"]


PLAN = xla.PtqProvider(RULES).plan(model, {"w": W}, X, kernels=False)
STORED = PLAN.quantize({"w": W})
RICH = {
    "a": quantized("int4", (2, 8, 3)),
    "b": [jnp.arange(3.0), np.arange(2), None],
    "key": jax.random.key(1),
    "value": 3,
    "tuples": {("x", 1): quantized("int3", (2, 8, 3))},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    xla.save(folder / "plan.safetensors", STORED, PLAN)
    xla.save(folder / "rich.safetensors", RICH, extra={"beside": jnp.ones(2)})
    xla.save(folder / "shards", STORED, PLAN, format="shards")
    return folder


def manifest_of(file):
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["jaxtap.manifest"])


def rewrite(file, new, text, key="jaxtap.manifest"):
    """Write a file with another JSON text in its header, and right checksums."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    header["__metadata__"] |= {key: text, "jaxtap.sha256": BLANK}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    new.write_bytes(seal(struct.pack("<Q", len(text)) + text) + body)
    return new


def use(path, plan):
    """Do all that is done with a file; nothing but a StoreError may come out of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xla.QuantizationWarning)
        for run in (
            lambda: xla.load(path),
            lambda: xla.load_extra(path),
            lambda: xla.load(path, plan=plan),
            lambda: xla.read_manifest(path).rules(),
            lambda: str(xla.read_manifest(path)),
        ):
            with contextlib.suppress(xla.StoreError):
                run()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([-1, 0, 1, 2, 3, 2**31, 2**63])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "int8", "float32", "qarray", "carrier", "packed", "w", "class", "("]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["", "w", "dict", "tuple", "kind", "0"]), inner, max_size=3
        )
    ),
    max_leaves=5,
)


def places(value, path=()):
    """Return the paths of all values in a JSON value, but the first."""
    if not isinstance(value, dict | list):
        return []
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, child in pairs:
        found += [(*path, key), *(places(child, (*path, key)) if child else [])]
    return found


def changed(draw, value):
    """Return a JSON value with one to three changes."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        found = places(value)
        if not found:
            break
        *path, key = draw(st.sampled_from(found))
        node = value
        for step in path:
            node = node[step]
        what = draw(st.sampled_from(["replace", "delete", "twice", "move"]))
        if what == "replace":
            node[key] = draw(JSON)
        elif what == "delete":
            del node[key]
        elif what == "twice" and isinstance(node, list):
            node.insert(key, copy.deepcopy(node[key]))
        elif isinstance(node, dict):
            node[draw(st.sampled_from(["", "x", "qtype", "class", "extra"]))] = node[key]
    return value


QUIET = {"suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


@examples(400, **QUIET)
@given(data=st.data())
def test_any_manifest(files, tmp_path, data):
    name = data.draw(st.sampled_from(["plan", "rich"]))
    file = files / f"{name}.safetensors"
    text = json.dumps(changed(data.draw, manifest_of(file)))
    use(rewrite(file, tmp_path / "new.safetensors", text), PLAN)


@examples(200, **QUIET)
@given(data=st.data())
def test_any_index_of_shards(files, tmp_path, data):
    folder = tmp_path / "new"
    shutil.copytree(files / "shards", folder, dirs_exist_ok=True)
    index = changed(data.draw, json.loads((folder / "jaxtap.index.json").read_text()))
    if isinstance(index, dict):
        index["jaxtap.sha256"] = BLANK
    text = canonical(index).encode()
    sealed = seal(text) if text.count(b'"jaxtap.sha256":"') == 1 else text
    (folder / "jaxtap.index.json").write_bytes(sealed)
    use(folder, PLAN)


FIELDS = ["class", "weight_qtype", "tile_size", "module_path", "rank", "alpha", "act_qtype", "x"]


@examples(300)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_any_rule(fields):
    found = {"class": "QuantizationRule", **fields}
    one = Manifest.from_json(
        {
            "format": 1,
            "params": {"structure": {"dict": []}, "leaves": []},
            "extra": None,
            "tensors": {},
            "plan": {"rules": [], "weights": {}},
            "versions": {},
        }
    )
    one.plan["rules"].append(found)
    try:
        rules = one.rules()
    except xla.StoreError:
        return
    assert isinstance(rules[0], xla.QuantizationRule)


WRONG = {
    "a list for an object": lambda m: m.update(tensors=[]),
    "a list for the plan": lambda m: m.update(plan=[]),
    "a rule that is a list": lambda m: m["plan"].update(rules=[[]]),
    "no class of a rule": lambda m: m["plan"]["rules"][0].pop("class"),
    "weights that are a list": lambda m: m["plan"].update(weights=[]),
    "a weight without its method": lambda m: m["plan"]["weights"]["w"].pop("method"),
    "a negative format": lambda m: m.update(format=-1),
    "a format that is text": lambda m: m.update(format="1"),
    "a format that is true": lambda m: m.update(format=True),
    "a key that is a list": lambda m: m["params"].update(structure={"dict": [[[1], 0]]}),
    "a key that is null": lambda m: m["params"].update(structure={"dict": [[None, 0]]}),
    "an unknown field": lambda m: m.update(more=1),
    "no type of a leaf": lambda m: m["params"]["leaves"][0]["about"].pop("dtype"),
    "a negative size": lambda m: m["params"]["leaves"][0]["about"].update(shape=[-1, 32]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_said(files, tmp_path, wrong):
    file = files / "plan.safetensors"
    manifest = manifest_of(file)
    WRONG[wrong](manifest)
    path = rewrite(file, tmp_path / "a.safetensors", json.dumps(manifest))
    with pytest.raises(xla.StoreError, match="manifest can't be read"):
        xla.load(path)


def test_keys_twice(files, tmp_path):
    rich, plan = files / "rich.safetensors", files / "plan.safetensors"
    text = json.dumps(manifest_of(plan))
    twice = text.replace('"format": 1', '"format": 1, "format": 1')
    path = rewrite(plan, tmp_path / "a.safetensors", twice)
    with pytest.raises(xla.StoreError, match="a key twice"):
        xla.load(path)
    manifest = manifest_of(rich)
    pairs = manifest["params"]["structure"]["dict"]
    pairs[1][0] = pairs[0][0]
    path = rewrite(rich, tmp_path / "b.safetensors", json.dumps(manifest))
    with pytest.raises(xla.StoreError, match="a key twice"):
        xla.load(path)


def test_checksums_that_are_a_list(files, tmp_path):
    path = rewrite(files / "plan.safetensors", tmp_path / "a.safetensors", "[]", "jaxtap.tensors")
    with pytest.raises(xla.StoreError, match="Expected `object`, got `array`"):
        xla.load(path)


def test_an_index_names_no_file_outside_of_its_folder(files, tmp_path):
    folder = tmp_path / "new"
    shutil.copytree(files / "shards", folder)
    path = folder / "jaxtap.index.json"
    index = json.loads(path.read_text())
    (name,) = index["files"]
    index["files"] = {f"../new/{name}": index["files"][name]}
    index["jaxtap.sha256"] = BLANK
    path.write_bytes(seal(canonical(index).encode()))
    with pytest.raises(xla.StoreError, match=r"`key` in `\$\.files`"):
        xla.load(folder)
