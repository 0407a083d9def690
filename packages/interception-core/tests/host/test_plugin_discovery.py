import pytest

from interception_core import PluginRecord
from interception_core.plugins.records import discover


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Puts distributions on sys.path that consist of their metadata alone."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name, entry_points, metadata=None):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        default = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        (folder / "METADATA").write_text(default if metadata is None else metadata)
        (folder / "entry_points.txt").write_text(entry_points)

    return install


def found(*names):
    return [item for item in discover() if item.name in names]


def test_finds_the_entry_points_of_the_group(installed):
    installed("acme", "[jaxtap]\nacme = acme.plugin\nacme-more = acme.more\n[other]\nx = y\n")
    assert found("acme", "acme-more", "x") == [
        PluginRecord("acme", "acme.plugin", "acme", "1.0"),
        PluginRecord("acme-more", "acme.more", "acme", "1.0"),
    ]


def test_finds_its_own(installed):
    (own,) = found("interception-core")
    assert own.module == "interception_core._plugin"


@pytest.mark.slow
def test_unreadable_metadata_is_the_problem_of_its_distribution_alone(installed):
    installed("good", "[jaxtap]\ngood = good.plugin\n")
    installed("bad", "[jaxtap]\nnot an entry point\n")
    installed("unrelated", "[other]\nnot an entry point\n")
    assert [item.name for item in discover() if item.distribution == "unrelated"] == []
    good, bad = found("good", "bad")[::-1]
    assert good == PluginRecord("good", "good.plugin", "good", "1.0")
    assert bad.error is not None
    assert found("interception-core")


def test_a_distribution_hides_its_namesake_later_on_the_path(installed, tmp_path, monkeypatch):
    installed("bad", "[jaxtap]\nnot an entry point\n")
    installed("acme", "[jaxtap]\nacme = acme.old\n")
    newer = tmp_path / "newer" / "acme-2.0.dist-info"
    newer.mkdir(parents=True)
    (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 2.0\n")
    (newer / "entry_points.txt").write_text("[jaxtap]\nacme = acme.new\n")
    monkeypatch.syspath_prepend(newer.parent)
    assert found("acme") == [PluginRecord("acme", "acme.new", "acme", "2.0")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:importlib.metadata")
def test_incomplete_metadata_is_not_an_error(installed):
    installed("acme", "[jaxtap]\nacme = acme.plugin\n", metadata="")
    (item,) = found("acme")
    assert item.module == "acme.plugin"
