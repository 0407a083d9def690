"""Pass: what all passes have in common."""

from __future__ import annotations

import abc
from typing import ClassVar

from .state import Weight

TRANSFORM, MASK, CODES = range(3)


class Pass(abc.ABC):
    """Base of passes, which change one parameter of a plan at a time.

    Attributes:
        stage: passes that transform channels come before those that choose zeros, and these
            before the one that chooses quantized values.
        needs_peaks: whether it asks for ``Weight.peaks``.
    """

    stage: ClassVar[int]
    needs_peaks: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """What the report calls it."""
        return type(self).__name__

    @abc.abstractmethod
    def run(self, weight: Weight) -> str | None:
        """Change a parameter; return why it is left alone, or None."""
