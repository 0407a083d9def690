"""Artifact: an exported file, and what is known of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from provider_odml.features import save

from ..litert import Runner
from .report import Report


@dataclass(frozen=True)
class Artifact:
    """An exported .tflite.

    Attributes:
        model: the file's bytes.
        report: what was found out about it.
    """

    model: bytes
    report: Report

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the file: all of it, or nothing. Return the path."""
        return save(path, self.model)

    def run(
        self, signature: str = "serving_default", /, **inputs: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Run a signature in LiteRT's interpreter: inputs and outputs as typed in the file."""
        return Runner(self.model).run(signature, **inputs)

    def __repr__(self) -> str:
        return f"Artifact({len(self.model)} bytes, {len(self.report.sites)} sites)"
