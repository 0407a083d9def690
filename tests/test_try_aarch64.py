"""tools/try_aarch64: what it needs, where its packages go, and its checks on this machine."""

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import te_ffi_kernels as te

TOOLS = Path(__file__).resolve().parent.parent / "tools"


def run(
    tool: str, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env)


def test_it_says_what_is_missing(tmp_path: Path) -> None:
    result = run("try_aarch64", str(tmp_path), env={"PATH": str(tmp_path)})
    assert result.returncode == 3
    assert "there must be apt-get, dpkg-deb, uv, qemu-aarch64" in result.stderr
    assert "apt install qemu-user-static" in result.stderr


def test_apt_changes_its_folder_alone(tmp_path: Path) -> None:
    loader = importlib.machinery.SourceFileLoader("try_aarch64", str(TOOLS / "try_aarch64"))
    spec = importlib.util.spec_from_loader("try_aarch64", loader)
    assert spec is not None
    tool = importlib.util.module_from_spec(spec)
    loader.exec_module(tool)
    options = tool.apt_options(tmp_path)
    assert options[::2] == ["-o"] * (len(options) // 2)
    settings = dict(option.split("=", 1) for option in options[1::2])
    folders = {name: value for name, value in settings.items() if name.startswith("Dir::")}
    # What apt-get writes: lists, downloads, and what is installed.
    assert folders.keys() >= {"Dir::State::Lists", "Dir::State::status", "Dir::Cache::archives"}
    assert all(Path(value).is_relative_to(tmp_path) for value in folders.values())
    assert settings["APT::Architecture"] == "arm64"


@pytest.mark.slow
def test_all_checks_pass_here() -> None:
    result = run("kernel_checks.py", te.isa())
    assert result.returncode == 0, result.stdout + result.stderr
    assert "26 of 26 checks passed" in result.stdout
    assert "WRONG" not in result.stdout


@pytest.mark.slow
def test_another_instruction_set_is_refused() -> None:
    result = run("kernel_checks.py", "neon_of_another_machine")
    assert result.returncode == 1
    assert f"must use neon_of_another_machine, got {te.isa()}" in result.stdout
