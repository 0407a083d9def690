"""The site's index lists every document, and its checker finds broken links."""

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def tool(name):
    """Return a script of ``tools``, as a module."""
    loader = SourceFileLoader(name, str(ROOT / "tools" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build_site():
    return tool("build_site")


def test_the_index_lists_every_document(build_site):
    listed = {page for group in build_site.navigation() for page in find(group)}
    documents = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")}
    notebooks = {f"docs/notebooks/{p.stem}.md" for p in ROOT.glob("docs/notebooks/*.ipynb")}
    assert len(notebooks) == 2
    assert documents | notebooks <= listed


def test_the_reference_has_every_package(build_site):
    packages = {path.parent.name for path in ROOT.glob("packages/*/src/*/__init__.py")}
    assert packages - {"jaxtap"} == set(build_site.PACKAGES)  # which brings the others


def find(group):
    for value in group.values():
        yield from [value] if isinstance(value, str) else (p for one in value for p in find(one))


def test_broken_links_are_found(tmp_path):
    check_links = tool("check_links")
    pages = {
        "index.html": '<a href="a/">a</a> <a href="#top">top</a> <p id="top">',
        "a/index.html": '<a href="../b/#there">b</a> <a href="https://example.org/x">x</a>',
        "b/index.html": '<p id="there"><img src="../a.svg"> <a href="%61.html">same</a>',
        "b/a.html": "",
    }
    for name, text in pages.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "a.svg").write_text("<svg/>")
    assert list(check_links.check(tmp_path)) == []
    for text, problem in [
        ('<a href="gone/">', "gone/ does not exist"),
        ('<a href="b/#gone">', "names a place that is not there"),
        ('<img src="gone.png">', "gone.png does not exist"),
        ('<script src="https://example.org/x.js"></script>', "from the network"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "from the network"),
    ]:
        (tmp_path / "index.html").write_text(pages["index.html"] + text)
        (found,) = check_links.check(tmp_path)
        assert problem in found
    (tmp_path / "index.html").write_text("")
    assert {line.partition(":")[0] for line in check_links.check(tmp_path)} == {"a/index.html"}
    (tmp_path / "x.css").write_text("@font-face { src: url(https://example.org/x.woff2) }")
    assert any("x.css loads" in line for line in check_links.check(tmp_path))


def test_links_to_what_is_not_a_page_lead_to_the_source(build_site, tmp_path):
    page = tmp_path / "docs" / "x.md"
    page.parent.mkdir()
    (tmp_path / "docs" / "y.md").write_text("# Y")
    page.write_text("[a](y.md#y) [b](../tools/lint) [c](notebooks/n.ipynb) `[d](e)`\n")
    build_site.rewrite_links(tmp_path)
    source = build_site.SOURCE
    assert page.read_text() == (
        f"[a](y.md#y) [b]({source}tools/lint) [c](notebooks/n.md) `[d](e)`\n"
    )
    page.write_text("[a](../tools/gone)")
    with pytest.raises(SystemExit, match="gone does not exist"):
        build_site.rewrite_links(tmp_path)
