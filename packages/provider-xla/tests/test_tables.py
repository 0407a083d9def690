"""Tables beside tabulate's."""

import pytest
from tabulate import tabulate

from provider_xla.tables import table

ROWS = {
    "none": [],
    "one": [["a", "bb", "1.00"]],
    "longer than the headers": [
        ["op/matmul:0", "", "0.5"],
        ["x", "f32[8,64] x f32[64,32]", "12.25"],
    ],
    "numbers as text": [["007", "1e5", "-3"], ["1", "", ""]],
}


@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize("right", [(), (2,), (0, 1)])
def test_a_table(case, right):
    headers = ["op", "operands of it", "n"]
    align = ["right" if i in right else "left" for i in range(3)] if ROWS[case] else None
    wanted = tabulate(ROWS[case], headers, disable_numparse=True, colalign=align)
    found = table(ROWS[case], headers, right)
    if not ROWS[case]:  # tabulate aligns all headers to the left
        found = table([], headers)
    assert found == "\n".join(line.rstrip() for line in wanted.splitlines())
