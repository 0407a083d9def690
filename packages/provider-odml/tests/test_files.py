"""Files that are whole or not there."""

import os
import stat

import pytest

from provider_odml.features import save


def test_save(tmp_path):
    path = tmp_path / "a.tflite"
    path.write_bytes(b"old")
    assert save(path, b"new") == path
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "a.tflite"
    path.write_bytes(b"old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
