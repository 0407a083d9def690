"""Runs the Python of the READMEs and the documents."""

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

# docs/plugins.md holds the files of a plugin: interception-core's tests build and run them.
pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=[
        "README.md",
        "docs/interception.md",
        "docs/quantization.md",
        "docs/tracing.md",
        "packages/*/README.md",
    ],
).pytest()
