"""The Python of the READMEs and the documents runs, block by block, each file in one process.

docs/plugins.md and docs/kernels.md hold files of plugins: other tests build and run them.
"""

import importlib.util
import re
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

ROOT = Path(__file__).parent.parent
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
    "docs/odml.md": ["litert_converter", "ai_edge_litert"],
}
SLOW = re.compile("docs/|packages/quant-numerics/")
SYBIL = Sybil([PythonCodeBlockParser()])


@pytest.mark.parametrize(
    "file",
    # Those in docs/ train, calibrate and export.
    [pytest.param(f, marks=pytest.mark.slow if SLOW.match(f) else ()) for f in sorted(FILES)],
)
def test_its_python_runs(file):
    missing = [name for name in NEEDS.get(file, ()) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{file} needs {' and '.join(missing)}")
    for example in SYBIL.parse(ROOT / file).examples():
        example.evaluate()
