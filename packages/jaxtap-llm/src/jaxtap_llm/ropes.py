"""Rotary positions: how fast each pair of a head's numbers turns."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: ``theta``, and how long contexts are reached.

    Attributes:
        theta: base of the frequencies.
        factor: by how much positions are stretched; 1 for not at all, infinite for no positions.
        llama3: None, or Llama 3's (low_freq_factor, high_freq_factor, trained length): frequencies
            above stay, those below are stretched, and between them it is a mixture.
        yarn: None, or YaRN's (Peng et al. 2023, arXiv:2309.00071; beta_fast, beta_slow, trained
            length, whether bounds are whole): the same by how often a frequency turns.
        longrope: None, or LongRoPE's (Ding et al. 2024, arXiv:2402.13753): by how much each
            frequency is divided up to the trained length, and beyond it, and that length.
        scale: of cosines and sines.
        share: of a head that turns: its first numbers, as a head of that size.
        proportional: whether the first pairs of that share turn as those of a whole head instead,
            and the others stand still (Gemma 4).
    """

    theta: float
    factor: float = 1.0
    llama3: tuple[float, float, float] | None = None
    yarn: tuple[float, float, float, bool] | None = None
    longrope: tuple[tuple[float, ...], tuple[float, ...], int] | None = None
    scale: float = 1.0
    share: float = 1.0
    proportional: bool = False

    @property
    def length(self) -> float:
        """Positions beyond which the frequencies are others; infinite where they stay the same."""
        return math.inf if self.longrope is None else self.longrope[2]

    def frequencies(self, size: int, is_long: bool = False) -> Any:
        """Return float32 ``[pairs]``, in radians per position, for heads of a size.

        Args:
            size: of a head.
            is_long: whether there may be more positions than ``length``.
        """
        turning = int(size * self.share)
        if self.proportional:
            plain = self.theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
            plain[turning // 2 :] = 0
            return (plain / self.factor).astype(np.float32)
        size = turning
        plain = self.theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
        if self.yarn is not None:
            fast, slow, length, whole = self.yarn
            low, high = (
                size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
                for turns in (fast, slow)
            )
            if whole:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, size - 1)
            stretched = np.clip((np.arange(size // 2) - low) / max(high - low, 1e-3), 0, 1)
            return (plain * (1 - stretched + stretched / self.factor)).astype(np.float32)
        if self.longrope is not None:
            return (plain / np.asarray(self.longrope[is_long])).astype(np.float32)
        if self.llama3 is None:
            return (plain / self.factor).astype(np.float32)
        low, high, length = self.llama3
        turns = length * plain / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return (plain * (kept + (1 - kept) / self.factor)).astype(np.float32)
