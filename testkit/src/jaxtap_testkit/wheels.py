"""Wheels: third-party plugins that are built and installed."""

import os
import shutil
import subprocess
import sys
import zipfile


def build_wheel(folder, files):
    """Build a project's wheel. Return its path."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    command += ["--skip-dependency-check", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def install_wheel(wheel, site):
    """Install a wheel into a folder, beside what this environment has."""
    uv = os.environ.get("UV") or shutil.which("uv")
    if not uv:
        # What an installer does with a wheel that has no scripts.
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        return
    command = [uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--target", str(site)]
    command += ["--python", sys.executable, str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
