"""Saving and loading quantized parameters, through safetensors and orbax-checkpoint."""

from ._diff import PlanDiff
from ._errors import StoreError, StoreMismatchError
from ._float_files import Source
from ._load import load, load_extra, read_manifest
from ._manifest import Manifest
from ._quantize_file import quantize_file
from ._save import save

__all__ = [
    "Manifest",
    "PlanDiff",
    "Source",
    "StoreError",
    "StoreMismatchError",
    "load",
    "load_extra",
    "quantize_file",
    "read_manifest",
    "save",
]
