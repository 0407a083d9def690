"""The benchmark charts show what the tables of their pages say."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
FILES = ["compile.svg", "decode.svg", "growth.svg", "prefill.svg", "w8a8.svg"]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("charts")
    subprocess.run([sys.executable, ROOT / "tools/bench_charts", folder], check=True)
    return folder


def test_every_chart_is_checked(drawn):
    assert sorted(path.name for path in drawn.iterdir()) == FILES


@pytest.mark.parametrize("name", FILES)
def test_chart_is_that_of_its_page(drawn, name):
    text = (drawn / name).read_text()
    ElementTree.fromstring(text)
    message = "a page was measured again: run tools/bench_charts"
    assert (ROOT / "docs/images" / name).read_text() == text, message


def test_bars_are_as_long_as_the_page_says():
    text = (ROOT / "docs/images/decode.svg").read_text()
    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="14"', text)]
    page = (ROOT / "docs/benchmarks/llm.md").read_text()
    table = page.partition("213M, batch 1")[2].strip().split("\n\n")[1]
    rates = [float(row.split("|")[5].split()[0]) for row in table.splitlines()[2:]]
    assert len(widths) == len(rates) >= 7
    for width, rate in zip(widths, rates, strict=True):
        assert width / widths[-1] == pytest.approx(rate / rates[-1], abs=1e-4)
