"""Pass: what all passes have in common."""

from __future__ import annotations

import abc
from typing import ClassVar

import numpy as np

from .state import Weight

TRANSFORM, MASK, RANGE, ROUND = range(4)


class Pass(abc.ABC):
    """Base of passes, which change one parameter of a plan at a time.

    Attributes:
        stage: ``TRANSFORM``, ``MASK``, ``RANGE`` or ``ROUND``, in the order in which passes must
            come: those that transform channels, the one that chooses zeros, the one that chooses
            ranges, the one that chooses quantized values.
        needs_peaks: whether it reads ``Weight.peaks``, which takes another run over the batches.
        sequential: how many times activations are measured for it, along the depth of the model,
            each time with the parameters before as it rounded them; 0 for those of the float model.
    """

    stage: ClassVar[int]
    needs_peaks: ClassVar[bool] = False
    sequential: int = 0

    @property
    def name(self) -> str:
        """What the report calls it."""
        return type(self).__name__

    @abc.abstractmethod
    def run(self, weight: Weight) -> str | None:
        """Change a parameter; return why it is left alone, or None.

        Args:
            weight: the parameter and the statistics of its activations; changed in place.
        """

    def run_step(self, weight: Weight, step: int, gram: np.ndarray) -> None:
        """Change a parameter in one step of the loops around it, if the pass is ``sequential``.

        Args:
            weight: the parameter; changed in place.
            step: the number of the step; 0 without loops.
            gram: the Gram matrix of its activations in that step, float64 [K, K].
        """
        raise NotImplementedError
