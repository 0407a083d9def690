"""What follows a contraction and is folded into its parameter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Fold:
    """What follows a contraction of a parameter and is folded into it: ``slope * y + offset``.

    Attributes:
        slope: one per channel, float64.
        offset: one per channel, float64.
    """

    slope: np.ndarray
    offset: np.ndarray
