"""The README's first command."""

import json

import pytest

from interception_core.cli import main
from jaxtap_testkit.processes import run_python


def demo(*arguments):
    return run_python("-m", "interception_core", "demo", *arguments, strict=False, check=False)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    file = tmp_path_factory.mktemp("demo") / "demo.json"
    run = demo("--json", str(file), "--seed", "3")
    assert run.returncode == 0, run.stderr
    assert [path.name for path in file.parent.iterdir()] == ["demo.json"]
    return run, json.loads(file.read_text())


@pytest.mark.slow
def test_both_models_learn_and_stay_accurate(outcome):
    _, results = outcome
    assert [result["model"] for result in results] == ["convolutional", "attention"]
    for result in results:
        assert result["test_images"] == 450
        in_float, int8, int4 = result["outcomes"]
        assert [one["format"] for one in result["outcomes"]] == ["float", "w8a8", "w4a8"]
        assert in_float["accuracy"] > 0.95
        assert int8["accuracy"] > in_float["accuracy"] - 0.01
        assert int8["agreement"] > 0.98
        assert int4["accuracy"] > in_float["accuracy"] - 0.05


@pytest.mark.slow
def test_stored_parameters_are_small(outcome):
    _, results = outcome
    for result in results:
        in_float, int8, int4 = (one["parameter_bytes"] for one in result["outcomes"])
        assert int8 < in_float / 3
        assert int4 < in_float / 5


@pytest.mark.slow
def test_every_op_with_a_weight_ran_in_int8(outcome):
    _, (convolutional, attention) = outcome
    ops = [op["op_name"] for op in convolutional["ops"]]
    assert ops == ["conv_general_dilated"] * 2 + ["matmul"] * 2
    assert [op["op_name"] for op in attention["ops"]] == ["einsum"] * 5 + ["matmul"] * 3
    ran = [op["qtypes"] for op in convolutional["ops"] + attention["ops"]]
    of_activations = [[None, None]] * 2  # the scores and the mean of attention
    assert ran == [["int8", "int8"]] * 6 + of_activations + [["int8", "int8"]] * 4


@pytest.mark.slow
def test_output_shows_accuracy_agreement_and_the_table(outcome):
    run, _ = outcome
    for text in ("stored bytes", "same digit as in float", "classifier/matmul:1", "args[0]['"):
        assert text in run.stdout
    assert "training" not in run.stdout + run.stderr, "progress bars are for terminals"


@pytest.mark.slow
def test_both_engines_give_the_same_table(outcome, tmp_path):
    _, by_default = outcome
    file = tmp_path / "demo.json"
    run = demo("--json", str(file), "--seed", "3", "--engine", "patch")
    assert run.returncode == 0, run.stderr
    assert json.loads(file.read_text()) == by_default


@pytest.mark.parametrize("command", ["demo", "demo-xla"])
def test_nowhere_to_write_is_said_before_the_work(tmp_path, capsys, command):
    assert main([command, "--json", str(tmp_path / "missing" / "demo.json")]) == 1
    told = capsys.readouterr().err
    assert "must be in a folder that exists" in told
    # Before anything is imported.
    assert told.startswith("demo-xla: train two small models") == (command == "demo")
