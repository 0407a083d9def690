"""A file that was cut short or altered is refused, with one clear error; nothing is executed."""

import hashlib
import json
import pickle
import shutil
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import provider_xla as xla
from jaxtap_testkit.store_samples import quantized, same
from provider_xla.store.schema import BLANK, is_intact, seal

TREE = {"w": quantized("int4", (2, 8, 3)), "b": jnp.arange(3.0)}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "a.safetensors"
    xla.save(path, TREE)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("folder") / "a"
    xla.save(path, TREE)
    return path


def refused(path):
    with pytest.raises(xla.StoreError) as caught:
        xla.load(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def header_of(data):
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


@pytest.mark.slow
def test_cut_short_anywhere(file, tmp_path):
    data, path = file.read_bytes(), tmp_path / "cut.safetensors"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        refused(path)


@pytest.mark.slow
def test_a_byte_altered_anywhere(file, tmp_path):
    data, path = file.read_bytes(), tmp_path / "altered.safetensors"
    rng = np.random.default_rng(0)
    path.write_bytes(data)
    with path.open("r+b", buffering=0) as opened:
        for at in range(len(data)):
            opened.seek(at)
            opened.write(bytes([data[at] ^ int(rng.integers(1, 256))]))
            refused(path)
            opened.seek(at)
            opened.write(data[at : at + 1])
    same(xla.load(path), TREE)


@given(more=st.binary(min_size=1, max_size=20), at=st.floats(0, 1))
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_bytes_added_anywhere(file, tmp_path, more, at):
    data, path = file.read_bytes(), tmp_path / "longer.safetensors"
    at = int(at * len(data))
    path.write_bytes(data[:at] + more + data[at:])
    refused(path)


def test_tensors_exchanged(file, tmp_path):
    """The checksums belong to names."""
    tree = {"a": jnp.ones(4), "b": jnp.zeros(4)}
    path = tmp_path / "a.safetensors"
    xla.save(path, tree)
    data = path.read_bytes()
    a, b = bytes(np.ones(4, np.float32)), bytes(np.zeros(4, np.float32))
    assert data.endswith(a + b)
    path.write_bytes(data[: -len(a + b)] + b + a)
    assert "checksum of a" in refused(path)


def test_other_files(tmp_path):
    import safetensors.numpy

    plain = tmp_path / "plain.safetensors"
    safetensors.numpy.save_file({"a": np.ones(3)}, plain)
    assert "quantize_file" in refused(plain)
    (tmp_path / "empty").write_bytes(b"")
    refused(tmp_path / "empty")
    (tmp_path / "pickled").write_bytes(pickle.dumps(TREE["b"]))
    refused(tmp_path / "pickled")
    (tmp_path / "nothing").mkdir()
    assert "jaxtap.json" in refused(tmp_path / "nothing")
    with pytest.raises(xla.StoreError, match="does not exist"):
        xla.load(tmp_path / "absent")


def test_every_file_of_a_checkpoint(folder, tmp_path):
    rng = np.random.default_rng(1)
    files = [f.relative_to(folder) for f in folder.rglob("*") if f.is_file()]
    assert len(files) > 5
    for name in files:
        data = (folder / name).read_bytes()
        path = tmp_path / "copy"
        shutil.copytree(folder, path)
        for at in {0, len(data) // 2, len(data) - 1, *rng.integers(0, len(data) or 1, 20)}:
            if at < len(data):
                changed = data[:at] + bytes([data[at] ^ int(rng.integers(1, 256))]) + data[at + 1 :]
                (path / name).write_bytes(changed)
                refused(path)
                (path / name).write_bytes(data[:at])
                refused(path)
        (path / name).unlink()
        refused(path)
        shutil.rmtree(path)
    shutil.copytree(folder, path)
    same(xla.load(path), TREE)
    (path / "tensors" / "more").write_bytes(b"")
    assert "added" in refused(path)


def rewritten(file, path, change):
    """A file whose manifest is changed, with checksums that are right."""
    header, body = header_of(file.read_bytes())
    metadata = header["__metadata__"]
    manifest = json.loads(metadata["jaxtap.manifest"])
    change(manifest, header)
    metadata["jaxtap.manifest"] = json.dumps(manifest).replace(
        '"DEEP"', '{"list":[' * 5000 + "0" + "]}" * 5000
    )
    metadata["jaxtap.sha256"] = BLANK
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(seal(struct.pack("<Q", len(text)) + text) + body)
    return path


def test_a_later_version_is_refused_with_what_wrote_it(file, tmp_path):
    def later(manifest, _):
        manifest["format"] = 2
        manifest["versions"]["provider-xla"] = "9.1"

    message = refused(rewritten(file, tmp_path / "a.safetensors", later))
    assert "version 2" in message
    assert "9.1" in message


LIES = {
    "no such leaf": lambda m, h: m["params"].update(structure={"dict": [["x", 9]]}),
    "an odd structure": lambda m, h: m["params"].update(structure={"dict": 3}),
    "deep": lambda m, h: m["params"].update(structure="DEEP"),
    "no structure": lambda m, h: m.pop("params"),
    "another shape": lambda m, h: m["tensors"].update(b=["float32", [4]]),
    "a huge shape": lambda m, h: m["tensors"].update(b=["float32", [2**40]]),
    "another dtype": lambda m, h: m["tensors"].update(b=["int32", [3]]),
    "an unknown dtype": lambda m, h: m["tensors"].update(b=["object", [3]]),
    "one tensor less": lambda m, h: m["tensors"].pop("b"),
    "a tensor of nobody": lambda m, h: m["params"]["leaves"][0]["tensors"].update({"": "z"}),
    "another qtype": lambda m, h: m["params"]["leaves"][1]["about"].update(qtype="int8"),
    "an unknown qtype": lambda m, h: m["params"]["leaves"][1]["about"].update(qtype="x"),
    "an unknown kind": lambda m, h: m["params"]["leaves"][1].update(kind="pickle"),
    "no scale": lambda m, h: m["params"]["leaves"][1]["tensors"].pop("scale"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies(file, tmp_path, lie, monkeypatch):
    def called(*args, **kwargs):
        raise AssertionError("a pickle was read")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, called)
    path = rewritten(file, tmp_path / "a.safetensors", LIES[lie])
    refused(path)


def test_the_seal():
    text = json.dumps({"jaxtap.sha256": BLANK, "a": 'x"jaxtap.sha256":"' + BLANK}).replace(
        ": ", ":"
    )
    sealed = seal(text.encode())
    assert is_intact(sealed)
    assert not is_intact(sealed.replace(b'"a"', b'"b"'))
    assert is_intact(b"{}") is None
    assert json.loads(sealed)["jaxtap.sha256"] == hashlib.sha256(text.encode()).hexdigest()


def test_writing_fails_half_way(tmp_path, monkeypatch):
    """What was there stays, and nothing else is left."""
    from provider_xla.store import orbax
    from provider_xla.store.safetensors import Writer

    def fail(*args):
        raise KeyboardInterrupt

    for name, target, method in (
        ("a.safetensors", Writer, "finish"),
        ("a", orbax, "_digest"),
    ):
        path = tmp_path / name
        xla.save(path, TREE)
        with monkeypatch.context() as patch:
            patch.setattr(target, method, fail)
            with pytest.raises(KeyboardInterrupt):
                xla.save(path, {"other": jnp.ones(1)}, overwrite=True)
        same(xla.load(path), TREE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "a.safetensors"]


def test_what_is_there_is_not_overwritten(tmp_path):
    for name in ("a.safetensors", "a"):
        path = tmp_path / name
        xla.save(path, TREE)
        with pytest.raises(xla.StoreError, match="overwrite=True"):
            xla.save(path, {"b": jnp.ones(1)})
        same(xla.load(path), TREE)
        xla.save(path, {"b": jnp.ones(1)}, overwrite=True)
        same(xla.load(path), {"b": jnp.ones(1)})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "a.safetensors"]
    with pytest.raises(xla.StoreError, match="is not a folder"):
        xla.save(tmp_path / "no" / "a.safetensors", TREE)
