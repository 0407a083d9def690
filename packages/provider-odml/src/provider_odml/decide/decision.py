"""What is decided at each operation, and the tensors with static ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..capture.graph import Node


@dataclass(frozen=True)
class Site:
    """One tensor with a static range.

    Attributes:
        key: its name: what its statistics are kept under.
        tensor: the tensor.
        maker: the op id of what makes it, or reads it where nothing is known to; None for an input
            of the model. The key begins with it.
        qtype: "int8" or "int16".
        method: the calibration method.
        batch_axes: axes of which the mean of the ranges is taken; None if the rule says nothing.
        fixed: its range, where that is given.
        shape: of the tensor where it is observed.
        fingerprint: of the operation that it is observed at.
        steps: how many steps the loops have whose steps have a range each, the outermost first.
        is_joined: whether several steps of one call are joined by their extremes.
    """

    key: str
    tensor: str
    maker: str | None
    qtype: str
    method: str
    batch_axes: tuple[int, ...] | None
    fixed: tuple[float, float] | None
    shape: tuple[int, ...]
    fingerprint: str
    steps: tuple[int, ...] = ()
    is_joined: bool = False

    @property
    def is_symmetric(self) -> bool:
        """Whether its zero point is 0."""
        if self.qtype == "int16":
            return True
        return self.fixed is not None and self.fixed[0] == -self.fixed[1]


@dataclass(frozen=True)
class SiteUse:
    """Quantize with the range of a site.

    Attributes:
        site: its key.
        observe: whether what is quantized here is what the range is about.
        device_only: whether training does nothing here: the value is on the grid anyhow, or
            gets there in the next operation.
        is_part: whether what is quantized is a part of a tensor that others may read, too, or an
            input that others read at another scale or in float.
    """

    site: str
    observe: bool = False
    device_only: bool = False
    is_part: bool = False


@dataclass(frozen=True)
class WeightUse:
    """Quantize the parameter of a contraction: per channel or in blocks, symmetric.

    Attributes:
        qtype: its qtype.
        channel_axes: the axes along which scales differ.
        method: the calibration method.
        tile_size: how many values of a channel share a scale; None for all of them.
        tiled_axes: the axes that blocks run along, in the order of the contracted values.
    """

    qtype: str
    channel_axes: tuple[int, ...]
    method: str
    tile_size: int | None = None
    tiled_axes: tuple[int, ...] = ()


@dataclass(frozen=True)
class ConstantUse:
    """Quantize a parameter or constant of other operations: one range for all values.

    Attributes:
        qtype: its qtype.
        inverted: whether it is divided by: its inverse is quantized, and multiplied with.
    """

    qtype: str
    inverted: bool = False


@dataclass(frozen=True)
class DynamicUse:
    """Quantize as the device does where it finds the ranges.

    Attributes:
        channel_axes: the axes along which ranges differ: the rows.
    """

    channel_axes: tuple[int, ...]


Quantize = SiteUse | WeightUse | ConstantUse | DynamicUse


@dataclass(frozen=True)
class Decision:
    """What is done at one operation.

    Attributes:
        node: the operation.
        rule: the number of its rule; None without one.
        inputs: by slot, how an operand is quantized.
        output: how the output is.
        is_float: whether LiteRT computes it in float.
        reason: why it stays float, if a rule is about it.
        fused: whether it is a part of the contraction before it.
        head: that contraction's op id, where it is an affine function of the contraction's output.
        reads: of a contraction of a parameter with a static range, the site whose scale the
            activation has.
        row_of: the same where that is a row of a table: the op id of the lookup.
    """

    node: Node
    rule: int | None
    inputs: Mapping[int | str, Quantize] = field(default_factory=dict)
    output: SiteUse | None = None
    is_float: bool = False
    reason: str | None = None
    fused: bool = False
    head: str | None = None
    reads: str | None = None
    row_of: str | None = None

    @property
    def is_active(self) -> bool:
        """Whether anything is done."""
        return bool(self.inputs) or self.output is not None
