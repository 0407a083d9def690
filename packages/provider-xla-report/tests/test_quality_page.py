"""The HTML page: well formed, whole, and without the network."""

import math
import re
from html.parser import HTMLParser

import pytest

from provider_xla.program.record import Choice
from provider_xla_report.quality import QualityReport
from provider_xla_report.results import Error, FloatOp, OpQuality, OutputQuality, ParameterQuality

NASTY = "<script>alert('1')</script> & $x^2$ \"quoted\"/matmul:0"


def op(op_id, sqnr=30.0, paths=("args[0]['w']",), **changes):
    fields = {
        "op_id": op_id,
        "op_name": "matmul",
        "operands": ("f32[8,64]", "f32[64,32]"),
        "qtypes": (None, "int8"),
        "rule": 0,
        "paths": paths,
        "why": None,
        "kernels": {"cpu": Choice(None, "no kernel")},
        "calls": 1.0,
        "error": Error(sqnr, 0.25),
        "steps": (),
        "flops": 32768,
        "float_seconds": 1e-3,
        "seconds": 2e-3,
        "share": 0.2,
    }
    return OpQuality(**(fields | changes))


def sample(ops, timed=True):
    parameters = [
        ParameterQuality(
            "args[0]['w']", (64, 32), "float32", "int8", 0, 8192, 2176, Error(44, 0.1)
        ),
        ParameterQuality("args[0]['<b>']", (32,), "float32", None, None, 128, 128, None),
    ]
    outputs = [
        OutputQuality("['y']", (8, 32), "float32", Error(28.5, 0.5), 0.999, None),
        OutputQuality("['i']", (8,), "int32", None, None, 0.875),
    ]
    why = "because <i>"
    left = [FloatOp("einsum:0", "einsum", ("f32[2]",), (None, None), 1, why, flops=100)]  # type: ignore[arg-type]
    times = (3e-3, 4e-3) if timed else (None, None)
    return QualityReport(
        tuple(ops), tuple(left), tuple(parameters), tuple(outputs), ("a & b",), 1, "cpu", *times
    )


def many(count=60):
    steps = (Error(10.0, 0.1), Error(math.inf, 0.0), Error(None, None))
    return sample(
        [
            op(NASTY),
            op("exact:0", math.inf),
            op("not_run:0", None, error=Error(None, None), calls=0.0),
            op("noise:0", -3.0),
            op("scan(f)/matmul:0", 18.0, steps=steps, calls=3.0),
            op("take:0", seconds=None, float_seconds=None, share=None, rule=None),
            *(op(f"a/{'very/' * 20}long/name_{i}/matmul:0", 20.0 + i) for i in range(count - 6)),
        ]
    )


VOID = {"meta", "input", "link", "br", "img", "hr"}


class Page(HTMLParser):
    """Reads a page, and fails where a tag is not closed or closed twice."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.ids, self.links, self.rows = [], [], [], []
        self.texts, self.scripts, self.urls, self.titles = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.note(dict(attrs))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append(dict(attrs).get("id"))

    def handle_startendtag(self, tag, attrs):
        self.note(dict(attrs))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        place = self.open[-1] if self.open else None
        kept = {"script": self.scripts, "title": self.titles}.get(place, self.texts)
        kept.append(data)

    def note(self, attrs):
        if "id" in attrs:
            self.ids.append(attrs["id"])
        for name, value in attrs.items():
            if name in ("src", "href", "xlink:href", "action", "data"):
                (self.links if value.startswith("#") else self.urls).append(value)
            assert not name.startswith("on")
            self.links += re.findall(r"url\((#[^)]*)\)", value or "")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    many().save_html(path, title="Report of <me> & $you$")
    return path.read_text()


@pytest.fixture(scope="module")
def parsed(page):
    return Page(page)


def test_nothing_comes_from_elsewhere(page, parsed):
    assert parsed.urls == []
    assert not re.search(r"https?:|//[a-z]|@import", page.replace("// What is not known", ""))
    assert "default-src 'none'" in page


def test_ids_are_there_once_and_links_lead_to_them(parsed):
    assert len(set(parsed.ids)) == len(parsed.ids)
    links = {link[1:] for link in parsed.links}
    assert links <= set(parsed.ids)
    # Each bar of an operation leads to its row.
    assert "op-0" in links


def test_every_operation_is_there(parsed):
    texts = [text.strip() for text in parsed.texts]
    for one in many().ops:
        assert one.op_id in texts
    assert {f"op-{i}" for i in range(60)} <= set(parsed.rows)


def test_what_stays_float_and_problems_are_there(parsed):
    for expected in ("einsum:0", "because <i>", "args[0]['<b>']", "a & b", "['y']", "['i']"):
        assert expected in parsed.texts
    assert "87.5% of the elements are the same" in " ".join(parsed.texts)


def test_nothing_is_markup_that_came_from_names(page, parsed):
    assert len(parsed.scripts) == 1
    assert "alert" not in parsed.scripts[0]
    assert page.count("<script>") == 1
    assert NASTY in [text.strip() for text in parsed.texts]
    assert "Report of <me> & $you$" in parsed.texts
    assert any(NASTY in title for title in parsed.titles)  # the tips of bars


def test_charts_have_the_worst_and_say_what_they_leave_out(page):
    error = page[page.index("Which operations lose") : page.index("How small the parameters")]
    wide, narrow = re.findall(r"<svg.*?</svg>", error, re.DOTALL)
    for svg in (wide, narrow):
        names = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
        assert names[0] == "noise:0"
        assert "not_run:0" not in names
    assert "(steps 10.0 to 10.0)" in wide


def layers(count, slow=False):
    """Operations of equal layers, of which each third is slower than in float."""
    return sample(
        [
            op(
                f"layers/{i}/{part}/matmul:0",
                30.0 + i,
                seconds=3e-3 if slow and i % 3 == 0 else 1e-3,
                float_seconds=2e-3,
            )
            for i in range(count)
            for part in ("up", "down")
        ]
    )


@pytest.mark.parametrize(("count", "rows"), [(20, 40), (21, 2), (80, 2)])
def test_equal_layers_share_a_bar_where_not_all_fit(tmp_path, count, rows):
    layers(count).save_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for heading in ("Which operations lose", "Where the time goes"):
        text = page[page.index(heading) :]
        (wide, *_) = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
        assert len(re.findall(r"<a href=\"#op-", wide)) == rows * (1 + ("time" in heading))
        assert (f"layers/[0-{count - 1}]/up" in wide) == (rows == 2)
        assert (f"the worst of {count}" in wide) == (rows == 2 and "time" not in heading)
    assert {f"op-{i}" for i in range(2 * count)} <= set(Page(page).ids)


def test_slower_operations_say_what_to_do(tmp_path):
    report = layers(4, slow=True)
    assert [op.op_id for op in report.slower] == [
        f"layers/{i}/{part}/matmul:0" for i in (0, 3) for part in ("up", "down")
    ]
    report.save_html(tmp_path / "report.html")
    texts = " ".join(Page((tmp_path / "report.html").read_text()).texts)
    for text in (str(report), texts):
        assert "layers/3/up/matmul:0: XLA computes it" in text
        assert "Rule('layers/3/up') before the other rules leaves it float" in text
    assert layers(4).slower == ()


def test_colours_are_the_pages(page):
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        assert not re.search(r"#[0-9a-f]{6}", svg)
        assert "var(--ink)" in svg


def test_a_report_without_anything(tmp_path):
    report = sample([], timed=False)
    report.save_html(tmp_path / "empty.html")
    text = (tmp_path / "empty.html").read_text()
    Page(text)
    assert "Where the time goes" not in text
    assert "Time of one call" not in text
    assert str(report)


def test_the_page_is_whole_or_not_there(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        sample([]).save_html(path, title="\ud800")
    assert path.read_text() == "before"
    assert [found.name for found in tmp_path.iterdir()] == ["report.html"]
