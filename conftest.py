"""Runs the Python of the READMEs and the documents, and keeps the tests' processes small."""

import gc
import importlib.util

import jax
import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

# docs/plugins.md holds the files of a plugin: interception-core's tests build and run them.
pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=[
        "README.md",
        "docs/adapters.md",
        "docs/allocation.md",
        "docs/interception.md",
        "docs/lora.md",
        "docs/odml.md",
        "docs/passes.md",
        "docs/quantization.md",
        "docs/storing.md",
        "docs/reports.md",
        "docs/tracing.md",
        "packages/*/README.md",
    ],
).pytest()

# Without a C++ compiler there is no te-ffi-kernels, and everything else works.
collect_ignore_glob = []
if importlib.util.find_spec("te_ffi_kernels") is None:
    collect_ignore_glob += ["packages/te-ffi-kernels/*", "tests/test_kernel*"]
    collect_ignore_glob += ["packages/te-ffi-kernels-cuda13/*"]
    collect_ignore_glob += ["docs/quantization.md"]  # it asks for kernels

# docs/odml.md exports: without provider-odml[litert] there is nothing to export with.
if not all(map(importlib.util.find_spec, ("litert_converter", "ai_edge_litert"))):
    collect_ignore_glob += ["docs/odml.md"]


@pytest.fixture(scope="module", autouse=True)
def _small_process():
    """Forgets the programs of a module: the search for leaked tracers looks at every object."""
    yield
    jax.clear_caches()
    gc.collect()
