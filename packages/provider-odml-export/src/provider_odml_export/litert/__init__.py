"""The chain from StableHLO to a .tflite that runs. Nothing here imports jax."""

from __future__ import annotations

from .blocks import Blocks, in_blocks
from .converter import Program, artifact_version, convert
from .faults import repair
from .io import deduplicate, integer_io, with_outputs
from .model import Model, Op, Signature, Subgraph, Tensor
from .reader import read
from .run import Runner

__all__ = [
    "Blocks",
    "Model",
    "Op",
    "Program",
    "Runner",
    "Signature",
    "Subgraph",
    "Tensor",
    "artifact_version",
    "convert",
    "deduplicate",
    "in_blocks",
    "integer_io",
    "read",
    "repair",
    "with_outputs",
]
