"""Writers at the same time, killed ones, full disks, links to nothing."""

import os
import signal
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
from jaxtap_testkit.processes import run_python
from provider_xla.store.files import atomic_write

KINDS = ["a.safetensors", "folder"]


def tree(number):
    return {"w": jnp.full((64, 64), number, jnp.float32)}


@pytest.mark.parametrize("name", KINDS)
def test_one_of_many_writers_wins(tmp_path, name):
    """Each has written all of it before the first may take the name."""
    path, count = tmp_path / name, 8
    barrier, won, lost = threading.Barrier(count), [], []

    def write(number):
        try:
            with atomic_write(path, overwrite=False) as new:
                if name == "folder":
                    new.mkdir()
                    (new / "data").write_bytes(bytes([number]))
                else:
                    new.write_bytes(bytes([number]))
                barrier.wait()
            won.append(number)
        except xla.StoreError as error:
            lost.append(str(error))

    threads = [threading.Thread(target=write, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, count - 1)
    assert all("already exists" in message for message in lost)
    data = path / "data" if name == "folder" else path
    assert data.read_bytes() == bytes(won)
    assert [p.name for p in tmp_path.iterdir()] == [name]


KILLED = """
import sys, time
from pathlib import Path
from provider_xla.store.files import atomic_write
with atomic_write(Path(sys.argv[1]), overwrite=True) as new:
    new.mkdir() if sys.argv[2] == "folder" else new.write_bytes(bytes(1000))
    print("writing", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("name", KINDS)
def test_the_next_writer_removes_what_a_killed_one_left(tmp_path, name):
    path = tmp_path / name
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, path, name],
        stdout=subprocess.PIPE,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    try:
        assert process.stdout.readline() == b"writing\n"
        xla.save(path, tree(1))  # the other one still writes: its files are left alone
        assert len(list(tmp_path.iterdir())) == 3
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    xla.save(path, tree(2), overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    np.testing.assert_array_equal(xla.load(path)["w"], tree(2)["w"])


def test_a_folder_that_was_being_replaced_comes_back(tmp_path):
    path = tmp_path / "folder"
    xla.save(path, tree(1))
    hidden = f".folder.{'0' * 32}"
    path.rename(tmp_path / f"{hidden}.old")
    (tmp_path / f"{hidden}.new").mkdir()
    (tmp_path / f"{hidden}.lock").touch()
    with pytest.raises(xla.StoreError, match="already exists"):
        xla.save(path, tree(2))
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    np.testing.assert_array_equal(xla.load(path)["w"], tree(1)["w"])


@pytest.mark.parametrize("name", KINDS)
def test_a_link_to_nothing_is_there(tmp_path, name):
    path = tmp_path / name
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(xla.StoreError, match="already exists"):
        xla.save(path, tree(1))
    assert path.is_symlink()
    xla.save(path, tree(1), overwrite=True)
    assert not path.is_symlink()


FULL = """
import resource, sys
import numpy as np
import provider_xla as xla
sys.dont_write_bytecode = True  # half a module would stay in the environment
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    xla.save(sys.argv[1], {"w": np.random.default_rng(0).normal(size=100_000)})
except xla.StoreError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of files are Linux's")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.safetensors", "a.safetensors can't be written: [Errno 27]"),
        pytest.param("folder", "orbax can't write", marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_is_an_error_of_ours(tmp_path, name, text):
    printed = run_python("-c", FULL, tmp_path / name).stdout
    assert text in printed
    assert "Make space" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no folder that nobody can write to")
def test_a_folder_that_takes_no_files():
    with pytest.raises(xla.StoreError, match="can't be written"):
        xla.save("/proc/self/a.safetensors", tree(1))
