"""Bar charts of reports: lengths, marks, names and links, read back from the SVG."""

from xml.etree import ElementTree

import pytest

from interception_core.report_kit import FIRST, WARN, Bar, Row, chart, shorten, shorten_all


def drawn(rows, width=1000):
    """Return a chart as a tree. Raise where it is not XML."""
    return ElementTree.fromstring(chart(rows, width, "what <it> shows").encode())


def lengths(tree):
    return [float(one.get("width")) for one in tree.iter("rect")]


@pytest.mark.parametrize("width", [360, 1000])
def test_bars_are_as_long_as_their_values(width):
    rows = [Row(str(v), (Bar(v, FIRST, f"{v}"),), "tip") for v in (10.0, 20.0, 40.0)]
    tree = drawn(rows, width)
    found = lengths(tree)
    assert [one / found[0] for one in found] == pytest.approx([1, 2, 4], rel=1e-3)
    for one, text in zip(tree.iter("rect"), ("10.0", "20.0", "40.0"), strict=True):
        label = next(t for t in tree.iter("text") if t.text == text and t.get("x") > "0.00")
        end = float(one.get("x")) + float(one.get("width"))
        assert end < width
        assert label is not None


def test_values_are_written_behind_bars_and_marks():
    (text,) = [
        one
        for one in drawn([Row("a", (Bar(1.0, FIRST, "one"),), "tip", marks=(2.0,))]).iter("text")
        if one.text == "one"
    ]
    tree = drawn([Row("a", (Bar(1.0, FIRST, "one"),), "tip", marks=(2.0,))])
    (mark,) = tree.iter("path")
    (bar,) = tree.iter("rect")
    at = float(mark.get("d")[1:].split()[0])
    assert at - float(bar.get("x")) == pytest.approx(2 * float(bar.get("width")), abs=0.02)
    assert float(text.get("x")) == pytest.approx(at + 5, abs=0.02)


def test_all_of_it_is_inside_of_the_drawing():
    rows = [Row("a" * 60, (Bar(3.0, FIRST, "x"), Bar(0.0, WARN, "y")), "tip") for _ in range(3)]
    for width in (360, 1000):
        tree = drawn(rows, width)
        *_, wide, high = map(float, tree.get("viewBox").split())
        for one in tree.iter("rect"):
            assert 0 <= float(one.get("x")) <= float(one.get("x")) + float(one.get("width")) <= wide
            assert (
                0 <= float(one.get("y")) <= float(one.get("y")) + float(one.get("height")) <= high
            )
        tops = [float(one.get("y")) for one in tree.iter("rect")]
        assert tops == sorted(set(tops))


def test_values_of_zero_have_bars():
    assert lengths(drawn([Row("a", (Bar(0.0, FIRST, "0"),), "tip")])) == [1.5]


def test_bars_lead_to_rows_of_the_page():
    tree = drawn([Row("a", (Bar(1.0, FIRST, "1"),), "tip", "#op-1"),
                  Row("b", (Bar(1.0, WARN, "1"),), "tip")])  # fmt: skip
    (link,) = tree.iter("a")
    assert link.get("href") == "#op-1"
    assert link.find("rect").get("fill") == "var(--first)"
    assert [one.get("fill") for one in tree.iter("rect")] == ["var(--first)", "var(--warn)"]


def test_it_is_described_to_those_who_do_not_see_it():
    tree = drawn([Row("a", (Bar(1.0, FIRST, "1"),), "line\n& <tip>")])
    assert (tree.get("role"), tree.get("aria-label")) == ("img", "what <it> shows")
    assert next(tree.iter("title")).text == "line\n& <tip>"


def test_names_in_any_letters():
    for name in ("层/матрица/行列:0", "control\x07:0", "half\ud800:0", "<script>&\"':0"):
        tree = drawn([Row(name, (Bar(1.0, FIRST, "1"),), name)], 360)
        shown = name.replace("\x07", "\ufffd").replace("\ud800", "\ufffd")
        assert [one.text for one in tree.iter() if one.text == shown] == [shown] * 2


def test_long_names_lose_their_middle():
    for text, size, expected in [("abc", 3, "abc"), ("abcdefghij", 6, "ab…hij"),
                                 ("abcdef", 1, "a…f")]:  # fmt: skip
        assert shorten(text, size) == expected


@pytest.mark.parametrize(
    "names",
    [
        [f"Transformer/encoder/layers_{i}/attention/query/einsum:{i}" for i in range(24)],
        [f"args[0]['params']['encoder']['layers'][{i}]['mlp']['up']['kernel']" for i in range(24)],
        [f"encoder/layers/{i}/{part}/matmul:0" for i in range(12) for part in ("up", "down")],
        [f"decoder/blocks/{i}/cross_attention/value_projection/dot_general:7" for i in (1, 11)],
    ],
)
@pytest.mark.parametrize("size", [24, 36, 80])
def test_shortened_names_keep_what_tells_layers_apart(names, size):
    found = shorten_all(names, size)
    assert len(set(found)) == len(names)
    for name, short in zip(names, found, strict=True):
        assert len(short) <= size
        assert short == name or "…" in short
        assert short == name or len(name) > size
        assert short.endswith(name[-6:])
