"""The chain from StableHLO to a .tflite that runs. Nothing here imports jax."""

from __future__ import annotations

from ._aeq import PRESETS, AeqRecipe, AeqRule, names_of_op, quantize_weights
from ._convert import Program, artifact_version, convert
from ._io import deduplicate, integer_io
from ._model import Model, Op, Signature, Subgraph, Tensor
from ._read import read
from ._repair import repair
from ._run import Runner
from ._save import save

__all__ = [
    "PRESETS",
    "AeqRecipe",
    "AeqRule",
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
    "integer_io",
    "names_of_op",
    "quantize_weights",
    "read",
    "repair",
    "save",
]
