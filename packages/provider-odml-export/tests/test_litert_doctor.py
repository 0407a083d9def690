"""The check that ``jaxtap doctor`` makes of the libraries for export."""

from importlib.metadata import PackageNotFoundError

import pytest

from provider_odml_export import doctor


@pytest.fixture
def found(monkeypatch):
    """Installs the given versions; returns the findings by library."""

    def check(**versions):
        def version(name):
            try:
                return versions[name.replace("-", "_")]
            except KeyError:
                raise PackageNotFoundError(name) from None

        monkeypatch.setattr(doctor, "version", version)
        return {one.message.split()[0]: one for one in doctor.litert()}

    return check


def test_the_installed_libraries_are_fine():
    found = list(doctor.litert())
    assert [one.status for one in found] == ["ok"] * len(found)
    for name in ("litert-converter 0.5", "ai-edge-litert 2."):
        assert any(one.message.startswith(name) for one in found)


def test_a_missing_library_names_its_use(found):
    found = found(litert_converter="0.5.0")
    assert set(found) == {"litert-converter", "ai-edge-litert"}
    assert found["litert-converter"].status == "ok"
    missing = found["ai-edge-litert"]
    assert missing.status == "fail"
    assert missing.hint.startswith("pip install 'ai-edge-litert")
    assert "export needs" in missing.message


def test_another_version_is_warned_about(found):
    found = found(litert_converter="0.9", ai_edge_litert="2.3.1")
    assert sorted(one.status for one in found.values()) == ["ok", "warn"]
    assert "litert-converter 0.9 is not one" in found["litert-converter"].message
    assert found["litert-converter"].hint.startswith("pip install 'litert-converter")
