"""tools/gpu_check: what it is for is in the tests that it names."""

import importlib.machinery
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "gpu_check"


def module():
    loader = importlib.machinery.SourceFileLoader("gpu_check", str(TOOL))
    found = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_check", loader))
    loader.exec_module(found)
    return found


def test_every_test_that_it_names_is_there():
    tool = module()
    assert tool.STEPS.keys() == tool.RUN.keys()
    named = re.findall(r"(test_gpu_\w+\.py)::(test_\w+)", str(tool.STEPS["tests"]))
    assert len(named) > 8
    for file, test in named:
        text = (tool.TESTS / file).read_text()
        assert f"def {test}(" in text, f"{file}::{test}"
        assert "pytestmark = marks" in text
    listed = subprocess.run(
        [sys.executable, TOOL, "--list"], capture_output=True, text=True, check=True
    ).stdout
    assert all(text in listed for purposes in tool.STEPS.values() for text in purposes)


def test_its_page_has_what_each_step_found(tmp_path):
    """The head stays; steps that did not run have no section."""
    head, out = tmp_path / "head.md", tmp_path / "page.md"
    head.write_text("# Title\n\nText.\n\n<!-- results -->\n\nOld.\n")
    checks = {
        "tests": [["tests", True, "12 passed"]],
        "sanitizers": [["memcheck", False, "1 error"]],
    }
    speed = {
        "side": 64,
        "jax": "0.12",
        "results": [
            {"case": "copy", "seconds": {"kernel": 1e-6, "xla": 2e-6}, "bytes": 4e6,
             "copy_bytes_per_second": 5e12},
            {"case": "gemv", "seconds": {"kernel": 2e-6, "xla": 3e-6}, "flops": 4e6, "read": 1e6,
             "copy_bytes_per_second": 1e12},
        ],
    }  # fmt: skip
    times = {"compile": 0.5, "first": 0.002, "second": 0.001, "gpus": 1}
    first = {"results": [{"case": "softmax", "warms": False} | times]}
    for name, content in {"speed": speed, "first": first}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        checks[name] = [[name, True, "measured"]]
    found = {"gpu": ["1", "a GPU"], "steps": checks}
    (tmp_path / "found.json").write_text(json.dumps(found))
    script = ROOT / "benchmarks" / "cuda_page.py"
    subprocess.run([sys.executable, script, tmp_path, head, out], check=True)
    text = out.read_text()
    assert text.startswith("# Title\n\nText.\n\n<!-- results -->\n\nMachine: 1, a GPU.\n")
    assert "Old." not in text
    assert "- tests: passed, 12 passed" in text
    assert "- memcheck: FAILED, 1 error" in text
    assert "| copy | 1.0 | 4.00 | 80% | 2.0 | 2.00 |" in text
    assert "| gemv | 2.0 | 2.0 | 50% | 3.0 | 1.50 |" in text
    assert "| softmax | no | 500.0 | 2.0 | 1.0 |" in text
    assert "on one GPU, without NCCL" in text
    assert "A decoder" not in text
