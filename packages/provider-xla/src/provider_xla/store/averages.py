"""How static ranges follow from those of steps, as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import quant_numerics as qn


def average_json(average: qn.MovingAverage | qn.AmaxHistory) -> dict[str, Any]:
    """Return an average's, or a history's, fields."""
    return dataclasses.asdict(average)


def average_of(found: Mapping[str, Any]) -> qn.MovingAverage | qn.AmaxHistory:
    """Return what has these fields.

    Raises:
        TypeError, ValueError: nothing has them.
    """
    return qn.AmaxHistory(**found) if "length" in found else qn.MovingAverage(**found)
