"""Artifact: an exported file. Report: what is in it, and how it compares with JAX."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from provider_odml import OdmlError, Plan
from provider_odml.features import ConstantUse, Passage, WeightUse, save, stored_bytes, why

from ..litert import Model, Runner, Tensor
from .verify import OutputResult, SiteResult, bad_ranges


@dataclass(frozen=True)
class FloatOp:
    """An operation of the program that LiteRT computes in float.

    Attributes:
        operation: its op id.
        reason: why.
    """

    operation: str
    reason: str


@dataclass(frozen=True)
class Weight:
    """A parameter that is stored quantized.

    Attributes:
        operation: the op id of what reads it.
        dtype: as it is stored.
        shape: its shape.
        nbytes: its bytes, without its scales.
        block_size: how many values share a scale; 0 for one per channel or for all.
    """

    operation: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    block_size: int = 0


@dataclass(frozen=True)
class Interface:
    """A signature of the file.

    Attributes:
        name: its name.
        inputs: by name, the types.
        outputs: by name, the types.
    """

    name: str
    inputs: dict[str, str]
    outputs: dict[str, str]


@dataclass(frozen=True)
class Report:
    """What is in an exported file, and how it compares with JAX.

    Attributes:
        sites: every place where a tensor is quantized.
        outputs: every output.
        floats: what stayed float, and why.
        bytes_by_dtype: bytes of the constants.
        ops: the operations of the file, counted.
        float_ops: how many of them compute in floats.
        file_bytes: those of the file.
        signatures: its signatures.
        weights: the parameters that are quantized.
        backend: that of ``export``. The outputs are compared with JAX's fake quantization for
            "converter", with JAX in float for any other.
        sqnr_floor: the signal to noise that outputs were held to, in decibels; None for none.
        warnings: ranges that cost far more than those of their neighbours.
        notes: operations that are slower than in float, see ``Plan.notes``.
    """

    sites: tuple[SiteResult, ...]
    outputs: tuple[OutputResult, ...]
    floats: tuple[FloatOp, ...]
    bytes_by_dtype: dict[str, int]
    ops: dict[str, int]
    float_ops: int
    file_bytes: int = 0
    signatures: tuple[Interface, ...] = ()
    weights: tuple[Weight, ...] = ()
    backend: str = "converter"
    sqnr_floor: float | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        plans: Sequence[Plan],
        sites: Sequence[SiteResult],
        outputs: Sequence[OutputResult],
        model: Model,
        *,
        backend: str = "converter",
        sqnr_floor: float | None = None,
        weights: Sequence[Weight] | None = None,
        floats: Sequence[FloatOp] = (),
    ) -> Report:
        """Return the report of a file.

        Args:
            plans: those of the signatures.
            sites: how the sites compare.
            outputs: how the outputs compare.
            model: the file.
            backend: what made it.
            sqnr_floor: what outputs were held to.
            weights: the quantized parameters; None for those of the plans.
            floats: what else stayed float than the plans say.
        """
        found = {}
        for plan in plans:
            for op_id, decision in plan.decisions.items():
                if decision.is_float and decision.node.op.kind is not Passage.OUTPUT:
                    found[op_id] = FloatOp(op_id, decision.reason or why(plan, decision))
        found.update({one.operation: one for one in floats})
        return cls(
            tuple(sites),
            tuple(outputs),
            tuple(found.values()),
            dict(model.bytes_by_dtype()),
            dict(model.op_counts()),
            len(model.float_ops()),
            model.nbytes,
            tuple(_interface(model, name) for name in model.signatures),
            tuple(_planned(plans) if weights is None else weights),
            backend,
            sqnr_floor,
            tuple(bad_ranges(sites)),
            # Signatures of one program have the same.
            tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values, infinities and NaN as text."""
        found = asdict(self)
        return json.loads(json.dumps(found), parse_constant=str)

    def to_html(self, title: str = "Export report") -> str:
        """Return the report as one HTML page, which needs no network.

        Args:
            title: of the page.
        """
        from .page import page  # which imports Jinja

        return page(self, title)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report: all of it, or nothing.

        Args:
            path: where to; its suffix says how: ``.html``, ``.json`` or ``.txt``.

        Returns:
            The path.

        Raises:
            OdmlError: the suffix is another one.
        """
        forms = {
            ".html": self.to_html,
            ".json": lambda: json.dumps(self.as_json(), indent=2) + "\n",
            ".txt": lambda: f"{self}\n",
        }
        suffix = Path(path).suffix.lower()
        if suffix not in forms:
            raise OdmlError(
                f"The path of a report must end with {', '.join(forms)}, got {os.fspath(path)!r}."
            )
        return save(path, forms[suffix]().encode())

    def __str__(self) -> str:
        from tabulate import tabulate

        rows = [
            (s.place, s.op_name, s.qtype, f"{s.scale:.4g}", s.zero_point, f"{s.lsb:.2f}",
             f"{s.sqnr:.1f}", f"{s.float_sqnr:.1f}", s.reason or "")
            for s in self.sites
        ]  # fmt: skip
        head = (
            "site",
            "op",
            "type",
            "scale",
            "zero",
            "LSB",
            "SQNR dB",
            "to float",
            "float because",
        )
        parts = [tabulate(rows, headers=head)] if rows else []
        rows = [(o.signature, o.name, f"{o.error:.2%}", f"{o.sqnr:.1f}") for o in self.outputs]
        parts.append(tabulate(rows, headers=("signature", "output", "error", "SQNR dB")))
        parts += [f"warning: {one}" for one in self.warnings]
        parts += [f"slow in LiteRT: {one}" for one in self.notes]
        sizes = ", ".join(f"{k} {v}" for k, v in sorted(self.bytes_by_dtype.items()))
        count = sum(self.ops.values())
        islands = sum(site.is_float for site in self.sites)
        parts.append(
            f"bytes: {sizes}\n{len(self.sites)} quantized places, {islands} of them computed in "
            f"float\n{count} operations in the file, {self.float_ops} of them in float"
        )
        return "\n\n".join(parts)


def _interface(model: Model, name: str) -> Interface:
    one = model.signatures[name]
    inputs, outputs = (
        {key: _type(tensor) for key, tensor in each.items()} for each in (one.inputs, one.outputs)
    )
    return Interface(name, inputs, outputs)


def _type(tensor: Tensor) -> str:
    text = f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
    if tensor.grid is None:
        return text
    scale, point = tensor.grid
    return f"{text}, scale {scale:.4g}, zero point {point}"


def _planned(plans: Sequence[Plan]) -> list[Weight]:
    """Return the parameters that the plans quantize."""
    found = {}
    for plan in plans:
        for op_id, decision in plan.decisions.items():
            for use in decision.node.uses:
                placed = decision.inputs.get(use.slot)
                if isinstance(placed, WeightUse | ConstantUse):
                    nbytes = stored_bytes(use, placed.qtype)
                    one = Weight(op_id, placed.qtype, use.shape, nbytes)
                    found[op_id, use.slot] = one
    return list(found.values())


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
