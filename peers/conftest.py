"""Our results beside Qwix's: the same rule, the same input.

Run with ``uv run --group peers pytest -n 0 peers``, on the newest JAX. A table of the differences
that were measured follows the results.
"""

import pytest
from tabulate import tabulate

MEASURED: list[tuple] = []


def pytest_collection_modifyitems(items):
    # Qwix's. A mark counts more than what makes warnings errors, whichever is configured first.
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:'VariableState':DeprecationWarning"))


@pytest.fixture
def measured():
    """Takes rows: what, how it is quantized, ours to Qwix, its bound, ours and Qwix's to exact."""
    return MEASURED.append


def pytest_terminal_summary(terminalreporter):
    if MEASURED:
        headers = ["what", "quantized", "ours to Qwix", "bound", "ours to exact", "Qwix to exact"]
        terminalreporter.section("relative differences (Frobenius norm)")
        terminalreporter.write_line(tabulate(MEASURED, headers, floatfmt=".1e"))
