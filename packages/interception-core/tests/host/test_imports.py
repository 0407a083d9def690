"""Actions that wait for the import of a module."""

import importlib
import importlib.machinery
import inspect
import sys

import pytest

from interception_core import versions, when_imported


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module that no one has imported; return its name."""
    (tmp_path / "late_library").mkdir()
    (tmp_path / "late_library" / "__init__.py").write_text("")
    (tmp_path / "late_library" / "part.py").write_text("VALUE = 3\ndef fn(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "late_library.part"
    for name in ("late_library.part", "late_library"):
        sys.modules.pop(name, None)


def test_a_jax_that_is_too_old_says_what_to_do(monkeypatch):
    real = versions.version
    monkeypatch.setattr(versions, "version", lambda name: "0.9.1" if name == "jax" else real(name))
    with pytest.raises(ImportError, match=r"needs JAX 0\.10\.2 or newer, got 0\.9\.1\. Run pip"):
        versions.check_jax()
    for found in ("0.10.2", "0.99.0.dev1"):
        monkeypatch.setattr(versions, "version", lambda name, found=found: found)
        versions.check_jax()


def test_an_action_runs_once_after_the_import(module):
    before, seen = list(sys.meta_path), []
    when_imported(module, lambda found: seen.append(found.VALUE))
    assert module not in sys.modules
    assert not seen
    found = importlib.import_module(module)
    assert seen == [3]
    assert sys.meta_path == before
    assert isinstance(found.__spec__.loader, importlib.machinery.SourceFileLoader)
    assert "def fn" in inspect.getsource(found.fn)
    when_imported(module, lambda found: seen.append(found.VALUE + 1))
    assert seen == [3, 4]
    importlib.reload(found)
    assert seen == [3, 4]


def test_several_wait_for_one_module(module):
    seen = []
    for number in range(3):
        when_imported(module, lambda found, number=number: seen.append(number))
    importlib.import_module(module)
    assert sorted(seen) == [0, 1, 2]


def test_an_import_that_fails_may_be_tried_again(module, tmp_path):
    seen = []
    file = tmp_path / "late_library" / "part.py"
    text = file.read_text()
    file.write_text("raise RuntimeError('broken')")
    when_imported(module, lambda found: seen.append(found.VALUE))
    with pytest.raises(RuntimeError, match="broken"):
        importlib.import_module(module)
    assert not seen
    file.write_text(text + "# of another size\n")
    importlib.invalidate_caches()
    importlib.import_module(module)
    assert seen == [3]
