"""scikit-build-core's build backend, which decides whether the CUDA kernels are built.

JAXTAP_CUDA in the environment says when:

  AUTO  where a GPU and nvcc 13 are; this is the default
  ON    always: without nvcc 13 the build fails
  OFF   never: the wheel has the Python part alone, and is for all systems

CMake runs, and is told which nvcc, if they are. NVIDIA's headers are a gigabyte of wheels, and are
asked for only if the kernels are built.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from scikit_build_core import build as _backend
from scikit_build_core.build import *  # noqa: F403

ROOT = Path(__file__).parent.parent
KERNELS = ROOT.parent / "te-ffi-kernels" / "csrc"
SHARED = ROOT / "shared"
"""Where an sdist has what the kernels share with those of te-ffi-kernels."""
_SHARED_SOURCES = ("**/*.h", "**/*.inl", "common/packed.cc", "ffi/stages.cc")
CUDA_MAJOR = 13
DEVICES = Path("/dev")
DEFAULT_HOME = "/usr/local/cuda"

_FOR_CUDA = [
    "jaxlib==0.10.2",
    "nvidia-cublas>=13,<14",
    # Later ones of cudnn-frontend want the headers of NVRTC as well.
    "nvidia-cudnn-cu13>=9.16,<10",
    "nvidia-cudnn-frontend>=1.18,<1.19",
]


def get_requires_for_build_wheel(config_settings=None):
    """As PEP 517 has it."""
    return [*_backend.get_requires_for_build_wheel(config_settings), *_for_cuda()]


def get_requires_for_build_editable(config_settings=None):
    """As PEP 660 has it."""
    return [*_backend.get_requires_for_build_editable(config_settings), *_for_cuda()]


def build_sdist(sdist_directory, config_settings=None):
    """As PEP 517 has it, with the sources of te-ffi-kernels that the kernels are made of.

    From an sdist it makes another one of the same files.
    """
    if not KERNELS.is_dir():
        return _backend.build_sdist(sdist_directory, config_settings)
    try:
        for pattern in _SHARED_SOURCES:
            for file in KERNELS.glob(pattern):
                copy = SHARED / file.relative_to(KERNELS)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
        return _backend.build_sdist(sdist_directory, config_settings)
    finally:
        shutil.rmtree(SHARED, ignore_errors=True)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """As PEP 517 has it."""
    settings = _with_decision(config_settings)
    return _backend.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """As PEP 660 has it."""
    settings = _with_decision(config_settings)
    return _backend.build_editable(wheel_directory, settings, metadata_directory)


def compiler():
    """Return the nvcc to build the kernels with, or None where they are not built."""
    wanted = os.environ.get("JAXTAP_CUDA", "AUTO")
    if wanted not in ("AUTO", "ON", "OFF"):
        sys.exit(f"JAXTAP_CUDA must be AUTO, ON or OFF, got {wanted}.")
    # A compiler alone says nothing about where the kernels are to run.
    if wanted == "OFF" or (wanted == "AUTO" and not has_gpu()):
        return None
    path = find_nvcc()
    found = version(path) if path else None
    if found is not None and found[0] == CUDA_MAJOR:
        return path
    got = "none" if path is None else f"{'.'.join(map(str, found or ('?',)))} at {path}"
    problem = f"nvcc must be version {CUDA_MAJOR}, got {got}."
    if wanted == "ON":
        sys.exit(f"JAXTAP_CUDA is ON: {problem} Install CUDA {CUDA_MAJOR}, or set CUDA_HOME.")
    print(f"te-ffi-kernels-cuda13 is built without kernels: {problem}", file=sys.stderr)
    return None


def has_gpu():
    """Tell whether NVIDIA's driver has made a device file here.

    WSL has none. The driver's files in /proc are not a sign: a container sees those of its host,
    also if it was given no GPU.
    """
    return any(DEVICES.glob("nvidia[0-9]*"))


def find_nvcc():
    """Return the path of nvcc, or None."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), DEFAULT_HOME]
    places = os.pathsep.join(os.path.join(home, "bin") for home in homes if home)
    return os.environ.get("CUDACXX") or shutil.which("nvcc") or shutil.which("nvcc", path=places)


def version(nvcc):
    """Return what nvcc says of itself, as (13, 0), or None where it says nothing."""
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\d+)\.(\d+)", said.stdout)
    return (int(found[1]), int(found[2])) if found else None


def _for_cuda():
    return _FOR_CUDA if compiler() else []


def _with_decision(config_settings):
    nvcc = compiler()
    if nvcc:
        decision = {"cmake.define.CMAKE_CUDA_COMPILER": nvcc}
    else:
        # Nothing in the wheel is of one platform: py3-none-any.
        decision = {"wheel.cmake": "false", "wheel.py-api": "py3"}
    return {**(config_settings or {}), **decision}
