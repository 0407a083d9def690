import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from provider_odml import OdmlError, Report
from provider_odml_export.exporting.report import FloatOp, Interface, Weight
from provider_odml_export.exporting.verify import OutputResult, SiteResult

VOID = {"meta", "br", "hr", "img", "link", "input"}

SITE = SiteResult(
    "main", "net/dense/dot_general:0", "dot_general", "int8", 0.0125, -7, 0.5, 1.01, 41.25, False,
    None,
)  # fmt: skip
REPORT = Report(
    sites=(
        SITE,
        replace(SITE, place="net/norm:0", op_name="norm_op", is_float=True, reason="no kernel"),
    ),
    outputs=(OutputResult("main", "logits", 0.0123, 38.5, True, math.inf),),
    floats=(
        FloatOp("net/norm:0", "no kernel"),
        FloatOp("net/sin:0", "computed in float"),
        FloatOp("net/cos:0", "computed in float"),
    ),
    bytes_by_dtype={"int8": 3000, "int32": 900, "float32": 100},
    ops={"FULLY_CONNECTED": 2, "SIN": 1},
    float_ops=1,
    file_bytes=6144,
    signatures=(Interface("main", {"x": "float32[1, 8]"}, {"logits": "float32[1, 4]"}),),
    weights=(Weight("net/dense/dot_general:0", "int4", (8, 4), 16, 32),),
)


class Page(HTMLParser):
    """The tags and texts of a page; fails where tags don't match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.attributes = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] not in (["style"], ["script"]) and data.strip():
            self.texts.append(" ".join(data.split()))


def test_the_page_says_what_is_in_the_report():
    texts = Page(REPORT.to_html()).texts
    for text in (
        "6.00 KiB", "2.93 KiB, 75.0%", "net/dense/dot_general:0", "0.0125", "-7", "41.2",
        "0.50 of 1.01", "logits", "1.230%", "float32[1, 8]", "in float: no kernel",
        "computed in float", "(2 operations)", "net/sin:0", "blocks of 32", "8 × 4", "16 B", "SIN",
    ):  # fmt: skip
        assert text in texts, text


def test_the_page_needs_nothing_else():
    text = REPORT.to_html()
    page = Page(text)
    assert not {"link", "img", "iframe"} & set(page.tags)
    assert not re.search(r"https?:|url\(|@import|src=", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert ("name", "viewport") in page.attributes
    assert page.tags.count("script") == 1


def test_bars_lead_to_their_rows():
    attributes = Page(REPORT.to_html()).attributes
    ids = [value for name, value in attributes if name == "id"]
    links = {value for name, value in attributes if name == "href"}
    assert links == {"#site-0", "#site-1"}
    assert len(set(ids)) == len(ids)
    assert {link[1:] for link in links} <= set(ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"sites": (replace(SITE, place="<b>\"'&", op_name="<b>", reason="<b>", is_float=True),)},
        {"outputs": (OutputResult("<b>", "<b>", 0.0, 1.0, True, 1.0),)},
        {"floats": (FloatOp("<b>", "<b>"),)},
        {"bytes_by_dtype": {'"><b>': 10}},
        {"ops": {"<b>": 1}},
        {"signatures": (Interface("<b>", {"<b>": "<b>"}, {"<b>": "<b>"}),)},
        {"weights": (Weight("<b>", "<b>", (1,), 1),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_everything_is_escaped(change):
    before = Page(REPORT.to_html()).tags
    page = Page(replace(REPORT, **change).to_html())
    assert page.tags.count("b") <= before.count("b")
    assert any("<b>" in text for text in page.texts)


def test_the_worst_places_come_first_in_the_chart():
    values = (30.0, 2.0, math.inf, math.nan)
    sites = [replace(SITE, place=f"p{value}", float_sqnr=value) for value in values]
    text = replace(REPORT, sites=tuple(sites)).to_html()
    wide = re.search(r"<svg.*?</svg>", text, re.DOTALL)[0]
    assert re.findall(r">(p[\w.]+)</text>", wide) == ["p2.0", "p30.0", "pinf"]
    bars = re.findall(r'width="([\d.]+)" height="\d+" rx="2" fill="var\(--(\w+)\)"', wide)
    lengths = [float(length) for length, _ in bars]
    assert lengths[1] == lengths[2] == pytest.approx(15 * lengths[0], rel=0.01)
    assert [colour for _, colour in bars] == ["warn", "first", "first"]


def test_a_place_that_is_off_is_marked():
    text = replace(REPORT, sites=(replace(SITE, lsb=9.0),)).to_html()
    assert 'class="n low" data-label="LSB"' in text
    assert 'class="n low"' not in REPORT.to_html()


def test_what_is_no_number_is_said_in_words():
    values = (math.inf, -math.inf, math.nan)
    outputs = tuple(OutputResult("main", "y", 0.0, value, True, 1.0) for value in values)
    texts = Page(replace(REPORT, outputs=outputs).to_html()).texts
    assert {"exact", "none", "not a number"} <= set(texts)


def test_the_page_of_an_empty_report():
    texts = Page(Report((), (), (), {}, {}, 0).to_html()).texts
    assert "Nothing does." in texts


def test_reasons_are_grouped_the_most_frequent_first():
    text = REPORT.to_html()
    assert text.index("<b>computed in float</b>") < text.index("<b>no kernel</b>")
    assert text.count("<summary>") == 2


def test_the_backend_is_named():
    report = replace(REPORT, backend="aeq", sqnr_floor=15.0)
    text = " ".join(Page(report.to_html()).texts)
    assert "the backend aeq" in text
    assert "15.0 dB" in text
    assert "the backend" not in REPORT.to_html()


def test_save_by_suffix(tmp_path):
    assert REPORT.save(tmp_path / "a.html").read_text() == REPORT.to_html()
    assert json.loads(REPORT.save(tmp_path / "a.json").read_text()) == REPORT.as_json()
    assert REPORT.save(str(tmp_path / "a.txt")).read_text() == f"{REPORT}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.json", "a.txt"]


def test_save_refuses_other_suffixes(tmp_path):
    with pytest.raises(OdmlError, match=r"must end with \.html, \.json, \.txt, got '.*a\.pdf'"):
        REPORT.save(tmp_path / "a.pdf")
    assert not list(tmp_path.iterdir())


def test_json_has_no_values_that_json_has_not():
    text = json.dumps(REPORT.as_json(), allow_nan=False)
    assert json.loads(text)["outputs"][0]["tolerance"] == "Infinity"
    assert json.loads(text)["weights"][0]["block_size"] == 32
