"""tools/kernel_checks.py, which tools/try_aarch64 runs in qemu, on this machine."""

import subprocess
import sys
from pathlib import Path

import pytest

import te_ffi_kernels as te

CHECKS = Path(__file__).resolve().parent.parent / "tools" / "kernel_checks.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, CHECKS, *arguments], capture_output=True, text=True)


@pytest.mark.slow
def test_all_checks_pass_here() -> None:
    result = run(te.isa())
    assert result.returncode == 0, result.stdout + result.stderr
    assert "26 of 26 checks passed" in result.stdout
    assert "WRONG" not in result.stdout


@pytest.mark.slow
def test_another_instruction_set_is_refused() -> None:
    result = run("neon_of_another_machine")
    assert result.returncode == 1
    assert f"must use neon_of_another_machine, got {te.isa()}" in result.stdout
