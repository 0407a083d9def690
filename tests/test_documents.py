"""The Python of the READMEs and the documents runs, block by block, each file in one process.

docs/plugins.md and docs/kernels.md hold files of plugins: other tests build and run them.
"""

import ast
import importlib
import importlib.util
import json
import re
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

from interception_core import CommandSpec
from interception_core.cli import main
from interception_core.plugins.host import loaded

ROOT = Path(__file__).parent.parent
COMMANDS, STABILITY = ROOT / "docs/commands.md", ROOT / "docs/stability.md"
FILES = [
    str(file.relative_to(ROOT))
    for file in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("packages/*/README.md")]
    if "```python" in file.read_text() and file.name not in ("plugins.md", "kernels.md")
]
# What a document asks for beyond Python: a compiler's kernels, the libraries of the export.
NEEDS = {
    "docs/quantization.md": ["te_ffi_kernels"],
    "docs/serving.md": ["te_ffi_kernels"],
    "packages/te-ffi-kernels/README.md": ["te_ffi_kernels"],
    "packages/te-ffi-kernels-cuda13/README.md": ["te_ffi_kernels_cuda13"],
    "docs/odml.md": ["provider_odml_export"],
}
SLOW = re.compile("docs/|packages/(quant-numerics|provider-xla-)")
SYBIL = Sybil([PythonCodeBlockParser()])


@pytest.mark.parametrize(
    "file",
    # Those in docs/ train, calibrate and export.
    [pytest.param(f, marks=pytest.mark.slow if SLOW.match(f) else ()) for f in sorted(FILES)],
)
def test_its_python_runs(file, tmp_path, monkeypatch):
    missing = [name for name in NEEDS.get(file, ()) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{file} needs {' and '.join(missing)}")
    monkeypatch.chdir(tmp_path)  # for the files that it writes
    for example in SYBIL.parse(ROOT / file).examples():
        example.evaluate()


@pytest.mark.parametrize("file", sorted(p.name for p in ROOT.glob("docs/notebooks/*.ipynb")))
def test_what_a_notebook_imports_exists(file):
    """The notebooks run when the site is built, last of the checks: a moved name is seen here."""
    pytest.importorskip("te_ffi_kernels")
    cells = json.loads((ROOT / "docs/notebooks" / file).read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    imports = [n for n in ast.walk(ast.parse(code)) if isinstance(n, (ast.Import, ast.ImportFrom))]
    assert imports
    exec("\n".join(map(ast.unparse, imports)), {})


def test_the_readme_is_twelve_lines_from_import_to_a_faster_model():
    first = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line for line in first[1].splitlines() if line.strip()]
    assert lines[0] == "import jax"
    assert "report" in lines[-1]
    assert len(lines) <= 12


def test_the_page_of_commands_has_every_command_and_how_it_prints_json(capsys):
    rows = re.findall(r"^\| `(.*?)` \|.*\| (.*?) \|$", COMMANDS.read_text(), re.MULTILINE)
    listed = {name.split()[0]: how for name, how in rows if not name.startswith("-")}
    for claim in loaded().of(CommandSpec):
        assert main([claim.spec.name, "--help"]) == 0
        usage = " ".join(capsys.readouterr().out.split())
        found = re.search(r"\[--json( FILE)?\]", usage)
        how = "none" if not found else "to a file" if found[1] else "prints it"
        assert listed.pop(claim.spec.name).startswith(how)
    assert not listed


def test_the_page_of_stability_counts_public_names():
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|$", STABILITY.read_text(), re.MULTILINE)
    assert len(rows) == 4
    for name, count in rows:
        assert len(importlib.import_module(name).__all__) == int(count), name


def test_no_document_has_the_marks_of_a_merge():
    files = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/**/README.md")]
    marked = [file for file in files if re.search(r"^(<{7}|>{7}) ", file.read_text(), re.M)]
    assert not marked
