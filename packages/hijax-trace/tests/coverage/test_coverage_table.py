"""docs/hijax-coverage.md says what this JAX, and hijax-trace on it, really do."""

from pathlib import Path

import jax
import pytest

from jaxtap_testkit.processes import run_python

HERE = Path(__file__).parent
TABLE = HERE.parents[3] / "docs" / "hijax-coverage.md"


def actual():
    """Returns the same as they are: in a process where JAX is used before hijax-trace."""
    run = run_python(HERE / "behaviours.py", strict=False)
    lines = [line.split("\t") for line in run.stdout.splitlines() if not line.startswith(" ")]
    return {(title, name): (own, ours) for title, name, own, ours in lines}


def documented():
    """Returns, by section and behaviour, what the table says of JAX and of ours."""
    rows, title = {}, None
    columns = {"0.10": 0, "0.11": 1, "0.12": 2}
    mine = columns[jax.__version__.rpartition(".")[0][:4]]
    for line in TABLE.read_text().splitlines():
        if line.startswith("## "):
            title = line[3:]
        elif line.startswith("| ") and not line.startswith(("| behaviour", "| ---")):
            name, *states = (cell.strip() for cell in line.strip("|").split(" | "))
            assert len(states) == 6, line
            rows[title, name] = states[mine], states[3 + mine]
    return rows


@pytest.mark.slow
@pytest.mark.skipif(not TABLE.exists(), reason="the table is in the repository's docs/")
def test_the_table_is_true():
    assert actual() == documented()
