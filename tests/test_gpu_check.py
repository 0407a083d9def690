"""tools/gpu_check: time limits, what is left of a run that is cut off, and its page."""

import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "gpu_check"


@pytest.fixture(scope="module")
def tool():
    loader = importlib.machinery.SourceFileLoader("gpu_check", str(TOOL))
    found = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_check", loader))
    loader.exec_module(found)
    return found


def test_each_step_has_a_method_and_its_share(tool):
    assert all(callable(getattr(tool.Check, name)) for name in tool.STEPS)
    assert sum(minutes for minutes, _ in tool.STEPS.values()) == pytest.approx(9)
    listed = subprocess.run(
        [sys.executable, TOOL, "--list"], capture_output=True, text=True, check=True
    ).stdout
    assert all(purpose in listed for _, purpose in tool.STEPS.values())


def is_running(pid):
    """Say whether a process has neither ended nor been killed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_command_is_stopped_at_its_limit_with_what_it_started(tool, tmp_path, capfd):
    """Its output until then is in the log."""
    script = tmp_path / "endless.sh"
    script.write_text("trap '' INT\nsleep 600 & echo begun $!\nwait\nsleep 600\n")
    start = time.monotonic()
    log = tool.Log(tmp_path / "log.txt")
    status, lines = tool.run(log, ["bash", script], os.environ, 1)
    assert status is None
    assert time.monotonic() - start < 20
    (begun,) = [line for line in lines if line.startswith("begun")]
    assert begun in (tmp_path / "log.txt").read_text()
    assert begun in capfd.readouterr().out
    # Killed: it is a zombie or gone as soon as the kernel lets it run for the last time.
    while is_running(begun.split()[1]):
        assert time.monotonic() - start < 20, f"{begun} outlives the command that started it"
        time.sleep(0.01)


def test_a_program_that_does_not_exist_is_said(tool, tmp_path):
    status, lines = tool.run(tool.Log(tmp_path / "log.txt"), ["/no/such"], os.environ, 1)
    assert status == -1
    assert "/no/such" in lines[0]


def test_what_the_kernels_tests_say_is_read(tool, tmp_path, monkeypatch):
    """Those that failed are named; so is the summary of a sanitizer."""
    program = tmp_path / "bin" / "cuda_tests"
    program.parent.mkdir()
    monkeypatch.setattr(tool, "SITE", tmp_path)
    check = tool.Check(tool.Log(tmp_path / "log.txt"), tmp_path, False)
    assert list(check.kernels(5)) == [("kernels", tool.NOT_RUN, "cuda_tests was not built")]
    text = "cuda_one 12 checks, 0 failed\ncuda_two 5 checks, 2 failed\n"
    program.write_text(f"#!/bin/sh\nprintf '{text}'\nexit 1\n")
    program.chmod(0o755)
    assert list(check.kernels(5)) == [("kernels", tool.FAILED, "2 tests, failed: cuda_two")]
    program.write_text("#!/bin/sh\necho 'cuda_one 12 checks, 0 failed'\nsleep 60\n")
    assert list(check.kernels(1)) == [("kernels", tool.CUT, "1 tests, no error until then")]
    # A tool that runs the program and then says what it found.
    tool_of_cuda = tmp_path / "compute-sanitizer"
    tool_of_cuda.write_text(
        "#!/bin/sh\necho cuda_one 12 checks, 0 failed\n"
        "echo ========= ERROR SUMMARY: 3 errors\nexit 9\n"
    )
    tool_of_cuda.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    said = "1 tests; ERROR SUMMARY: 3 errors"
    names = "memcheck", "racecheck", "initcheck"
    assert list(check.sanitizers(5)) == [(name, tool.FAILED, said) for name in names]


@pytest.mark.slow
def test_a_sticky_error_ends_its_worker_alone(tmp_path):
    """The tests after it run in another, and each result is written when it's there."""
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('i', range(6))\n"
        "def test_one(i):\n"
        "    if i == 2:\n"
        "        raise RuntimeError('CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access')\n"
        "    assert i != 4\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "-n", "1", "-q"]
    command += ["-p", "jaxtap_testkit.sticky", "-p", "no:jaxtap-testkit", "test_some.py"]
    # The process that starts workers must not take itself for one, as this one may be.
    env = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    env["JAXTAP_RESULTS"] = str(results)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    found = [json.loads(line) for line in results.read_text().splitlines()]
    outcomes = {line["test"].partition("[")[2]: line["outcome"] for line in found}
    assert outcomes == {f"{i}]": "failed" if i in (2, 4) else "passed" for i in range(6)}, (
        done.stdout
    )
    assert "sticky CUDA error in test_some.py::test_one[2]" in done.stderr


def test_its_page_has_what_each_step_found(tmp_path):
    """The head stays; steps that did not run have no section."""
    head, out = tmp_path / "head.md", tmp_path / "page.md"
    head.write_text("# Title\n\nText.\n\n<!-- results -->\n\nOld.\n")
    checks = {
        "tests": [["tests", "passed", "12 passed"]],
        "sanitizers": [["memcheck", "FAILED", "1 error"]],
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
    step = {"model": "MLP", "width": 64, "tokens": 32, "case": "float8", "seconds": 0.004}
    training = {"results": [step | {"speed": 1.25, "error": 0.0625}]}
    for name, content in {"speed": speed, "first": first, "training": training}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        checks[name] = [[name, "passed", "measured"]]
    found = {"gpu": ["1", "a GPU"], "steps": checks, "seconds": dict.fromkeys(checks, 7.2)}
    (tmp_path / "found.json").write_text(json.dumps(found))
    script = ROOT / "benchmarks" / "cuda_page.py"
    subprocess.run([sys.executable, script, tmp_path, head, out], check=True)
    text = out.read_text()
    assert text.startswith("# Title\n\nText.\n\n<!-- results -->\n\nMachine: 1, a GPU.\n")
    assert "Old." not in text
    assert "- tests: passed, 12 passed (7 s)" in text
    assert "- memcheck: FAILED, 1 error (7 s)" in text
    assert "| copy | 1.0 | 4.00 | 80% | 2.0 | 2.00 |" in text
    assert "| gemv | 2.0 | 2.0 | 50% | 3.0 | 1.50 |" in text
    assert "| softmax | no | 500.0 | 2.0 | 1.0 |" in text
    assert "on one GPU, without NCCL" in text
    assert "| MLP | 64 | 32 | float8 | 4.00 | 1.25 | 0.062 |" in text
    assert "A decoder" not in text
