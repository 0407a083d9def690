"""Every example runs, without a warning."""

import runpy
from pathlib import Path

import pytest

from interception_core.demo_kit import Digits

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example(example, monkeypatch, capsys):
    batches = Digits.batches
    # A part of their epochs is enough. That of QLoRA asserts what training gives.
    part = 2 if example.name == "qlora_digits.py" else 7

    def fewer(self, epochs=1, *more):
        return batches(self, -(-epochs // part), *more)

    monkeypatch.setattr(Digits, "batches", fewer)
    runpy.run_path(str(example), run_name="__main__")
    assert "unused" not in capsys.readouterr().out
