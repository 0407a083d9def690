"""``jaxtap demo --provider odml``, as a user runs it."""

import json
import sys

import pytest

from interception_core.cli import main
from jaxtap_testkit.processes import run_python


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    file = tmp_path_factory.mktemp("demo") / "demo.json"
    code = "import sys\nfrom interception_core.cli import main\nsys.exit(main(sys.argv[1:]))"
    words = "demo", "--provider", "odml", "--json", str(file), "--seed", "3"
    run = run_python("-c", code, *words, strict=False, check=False)
    assert run.returncode == 0, run.stderr
    assert [path.name for path in file.parent.iterdir()] == ["demo.json"]
    return run, json.loads(file.read_text())


@pytest.mark.slow  # it trains two models
class TestWithLitert:
    def test_the_device_is_as_accurate_as_training(self, outcome):
        _, result = outcome
        assert result["test_images"] == 450
        in_float, trained, device = result["outcomes"]
        assert [o["where"] for o in result["outcomes"]] == ["JAX, float", "JAX, QAT", "LiteRT"]
        assert in_float["accuracy"] > 0.95
        assert trained["accuracy"] > in_float["accuracy"] - 0.01
        assert device["accuracy"] > in_float["accuracy"] - 0.01
        assert device["agreement"] == 1
        assert device["nbytes"] < in_float["nbytes"] / 2.5

    def test_everything_is_integer_and_within_one_step(self, outcome):
        _, result = outcome
        report = result["report"]
        assert report["float_ops"] == 0
        assert set(report["bytes_by_dtype"]) <= {"int8", "int32"}
        assert len(report["sites"]) == 5
        assert all(site["lsb"] <= 1.01 for site in report["sites"])

    def test_output_shows_accuracy_and_the_report(self, outcome):
        run, _ = outcome
        for text in ("same digit as with QAT", "LiteRT", "conv2/relu:0", "SQNR dB", "0 of them"):
            assert text in run.stdout
        assert "training" not in run.stderr, "progress bars are for terminals"

    def test_nowhere_to_write_is_said_before_the_work(self, tmp_path, capsys):
        path = tmp_path / "missing" / "demo.json"
        assert main(["demo-odml", "--json", str(path)]) == 1
        error = capsys.readouterr().err
        assert "must be in a folder that exists" in error
        assert "training" not in error


def test_a_missing_library_is_said_before_the_work(monkeypatch, capsys):
    for name in ["optax", *sys.modules]:
        if name.partition(".")[0] == "optax":
            monkeypatch.setitem(sys.modules, name, None)
    assert main(["demo", "--provider", "odml"]) == 1
    error = capsys.readouterr().err
    (line,) = [line for line in error.splitlines() if line.startswith("jaxtap: error:")]
    assert "optax" in line
    assert "provider-odml-export[demo]" in line
    assert "training" not in error
