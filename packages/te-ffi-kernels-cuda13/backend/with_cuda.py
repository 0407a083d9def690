"""scikit-build-core's build backend, which asks for NVIDIA's headers where there is a compiler.

They are a gigabyte of wheels, and of no use to the Python part alone.
"""

import os
import shutil
import sys

from scikit_build_core import build as _backend
from scikit_build_core.build import *  # noqa: F403

_FOR_CUDA = [
    "nanobind>=2.9",
    "jaxlib==0.10.2",
    "nvidia-cublas>=13,<14",
    # Later ones of cudnn-frontend want the headers of NVRTC as well.
    "nvidia-cudnn-cu13>=9.16,<10",
    "nvidia-cudnn-frontend>=1.18,<1.19",
]


def get_requires_for_build_wheel(config_settings=None):
    """As PEP 517 has it."""
    return [*_backend.get_requires_for_build_wheel(config_settings), *for_cuda()]


def get_requires_for_build_editable(config_settings=None):
    """As PEP 660 has it."""
    return [*_backend.get_requires_for_build_editable(config_settings), *for_cuda()]


def for_cuda():
    """What the compiled part is built with; CMakeLists.txt looks for nvcc in the same places."""
    wanted = os.environ.get("JAXTAP_CUDA", "AUTO")
    if wanted == "OFF" or not sys.platform.startswith("linux"):
        return []
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = os.pathsep.join(os.path.join(home, "bin") for home in homes if home)
    found = shutil.which("nvcc") or shutil.which("nvcc", path=places)
    return _FOR_CUDA if found or wanted == "ON" else []
