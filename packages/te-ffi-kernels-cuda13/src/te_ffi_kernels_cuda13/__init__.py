"""The kernels of te-ffi-kernels on CUDA 13: its ops run them where a program is lowered for a GPU.

Importing this needs neither jax, nor a GPU, nor a driver; `status` tells what is missing.
"""

from importlib.metadata import version

from ._status import status, warm_counts

__version__ = version("te-ffi-kernels-cuda13")

__all__ = ["status", "warm_counts"]
