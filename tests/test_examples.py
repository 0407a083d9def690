"""Every example runs, without a warning."""

from pathlib import Path

import pytest

from jaxtap_testkit.processes import run_python

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example(example):
    assert "unused" not in run_python(example).stdout
