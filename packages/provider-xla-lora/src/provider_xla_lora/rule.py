"""LoraRule: which parameters get an adapter of a rank."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from provider_xla import QuantizationRule
from provider_xla.features import Adaptable

from .form import LoraForm


@dataclasses.dataclass(frozen=True)
class Lora:
    """A float adapter beside each parameter (arXiv:2106.09685), for ``Rule(lora=Lora(8))``.

    Attributes:
        rank: of its factors.
        alpha: the adapter is scaled by ``alpha / rank``; None is ``rank``.
        dropout: share of the activation that it does not see in training.
    """

    rank: int
    alpha: float | None = None
    dropout: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraRule(QuantizationRule):
    """A rule whose parameters get float adapters (LoRA, arXiv:2106.09685).

    With `weight_qtype` it is QLoRA (arXiv:2305.14314). See docs/lora.md.

    Attributes:
        rank: of the adapters.
        alpha: the contraction of the adapters is scaled by ``alpha / rank``. None is `rank`.
        dropout: share of the activation's elements that its adapter doesn't see in training,
            in [0, 1); the others are scaled by ``1 / (1 - dropout)``.

    Raises:
        ValueError: a field has a value that is not allowed; names the field.
    """

    adapts: ClassVar[bool] = True

    rank: int
    alpha: float | None = None
    dropout: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        rank, alpha, dropout = self.rank, self.alpha, self.dropout
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise ValueError(f"LoraRule.rank must be a positive integer. Got {rank!r}.")
        if alpha is not None and not (_is_number(alpha) and math.isfinite(alpha)):
            raise ValueError(f"LoraRule.alpha must be None or a finite number. Got {alpha!r}.")
        if not _is_number(dropout) or not 0 <= dropout < 1:
            raise ValueError(f"LoraRule.dropout must be a number in [0, 1). Got {dropout!r}.")

    def adapter(self, of: Adaptable) -> LoraForm:
        """Return the adapter of a parameter.

        Raises:
            ValueError: the rank is larger than that of the parameter.
        """
        rank = int(self.rank)
        rows, columns = (math.prod(of.shape[axis] for axis in axes)
                         for axes in (of.contracted, of.kept))  # fmt: skip
        if rank > min(rows, columns):
            raise ValueError(
                f"rank {rank} is larger than that of its matrix of {rows} contracted by "
                f"{columns} kept elements. Choose a rank of at most {min(rows, columns)}, or give "
                "the operation a separate rule."
            )
        alpha = float(rank if self.alpha is None else self.alpha)
        dropout = float(self.dropout)
        return LoraForm(**of._asdict(), rank=rank, alpha=alpha, dropout=dropout)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
