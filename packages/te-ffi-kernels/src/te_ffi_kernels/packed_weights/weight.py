"""PackedWeight: a weight in the order in which the kernels read it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from interception_core import quick_init

from .layout import TABLES, Layout


@jax.tree_util.register_dataclass
@quick_init
@dataclasses.dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight packed by ``pack_w8`` or ``pack_w4``; a pytree.

    It stands for a matrix of shape ``(k, n)``, or for several: ``lead`` are the axes of a stack of
    layers, which ``scan`` and ``vmap`` go through.

    Attributes:
        buffer: uint8[*lead, panels, bytes of a panel]: see ``packed_weights.layout``. A panel is 16
            columns (32 in 4 bits) and has a header, so the axis of panels can be sharded.
        k: rows, those that a matmul contracts (static).
        n: columns (static).
        bits: 8 or 4 (static).
        group: rows that share a scale, 0 for all (static).
        scale_dtype: of the scales, "float32", or "float16" in 4 bits; of the table "e2m1" also
            "float8_e8m0fnu" or "float8_e4m3fn" (static).
        table: in 4 bits, what quantized values stand for: "int4" for integers, "e2m1", "iq4_nl" or
            "nf4" (static).
    """

    buffer: jax.Array
    k: int = dataclasses.field(metadata={"static": True})
    n: int = dataclasses.field(metadata={"static": True})
    bits: int = dataclasses.field(metadata={"static": True})
    group: int = dataclasses.field(metadata={"static": True})
    scale_dtype: str = dataclasses.field(default="float32", metadata={"static": True})
    table: str = dataclasses.field(default="int4", metadata={"static": True})

    @classmethod
    def of(cls, buffer: jax.Array, n: int, layout: Layout) -> PackedWeight:
        """Return the weight of n columns in a layout's buffer."""
        kinds = layout.bits, layout.group, layout.scale_dtype, layout.table
        return cls(buffer, layout.k, n, *kinds)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of what it stands for."""
        return (*self.buffer.shape[:-2], self.k, self.n)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the buffer."""
        return self.buffer.size

    @property
    def layout(self) -> Layout:
        """Return how it is packed."""
        return Layout(self.k, self.bits, self.group, self.scale_dtype, self.table)

    @property
    def panel(self) -> int:
        """Return the columns of a panel: shards are cut between panels."""
        return self.layout.columns

    @property
    def question(self) -> dict[str, Any]:
        """Return the parameters that kernels are asked about."""
        return self.layout.question

    @property
    def rotates(self) -> tuple[str, ...]:
        """Return the platforms whose kernels can rotate the activation that they multiply with."""
        return ("cpu",)

    @property
    def scales(self) -> bool:
        """Return whether ops that quantize activations take a scale of all rows."""
        return True

    @property
    def adds(self) -> bool:
        """Return whether ops that multiply with it can add a bias and a residual."""
        return True

    @property
    def rounds(self) -> bool:
        """Return True: ``conv_op`` takes int8 activations, and ``y_scale=``."""
        return True

    @property
    def clamps(self) -> bool:
        """Return whether ops that multiply with it can cut results between two numbers."""
        return True

    @property
    def conv_op(self) -> str | None:
        """Return the op that convolves images, quantized to int8, with it; None of a table."""
        return f"conv_w{self.bits}a8" if self.table == "int4" else None

    @property
    def float_conv_op(self) -> str | None:
        """Return the op that convolves images of floats with it; None of a table."""
        return f"conv_w{self.bits}a16" if self.table == "int4" else None

    def matmul_op(self, *, quantizes: bool) -> str | None:
        """Return the op that multiplies with this weight.

        Args:
            quantizes: whether activations are quantized to int8 on the way.
        """
        return f"gemm_w{self.bits}a{8 if quantizes else 16}"

    def unpack(self) -> tuple[jax.Array, ...]:
        """Return values int8[*lead, k, n] and scales [*lead, groups, n], as they were packed.

        And float32[*lead, n], where there is a float for each column.
        """
        self.check()
        return self.layout.unpack(self.buffer, self.n)

    def parts(self) -> list[tuple[jax.Array, jax.Array]]:
        """Return int8[*lead, k, n] and float32[*lead, groups, n]: it is the sum of their products.

        Two where the table's numbers have more than 8 bits, else one.
        """
        qvalue, scale, *column = self.unpack()
        scale = scale.astype(jnp.float32)
        for one in column:
            scale = scale * one[..., None, :]
        if self.table == "int4":
            return [(qvalue, scale)]
        return [
            (_looked_up(values, qvalue, jnp.int8), scale * np.float32(factor))
            for values, factor in TABLES[self.table].parts
        ]

    def integers(self) -> tuple[jax.Array, jax.Array]:
        """Return integers [*lead, k, n] and float32[*lead, groups, n]: it is their product."""
        qvalue, scale = self.parts()[-1]
        if self.table == "int4":
            return qvalue, scale
        return _looked_up(TABLES[self.table].values, self.unpack()[0], jnp.int16), scale

    def check(self) -> None:
        """Raise a ValueError if the buffer cannot be such a weight."""
        wanted = self.layout.buffer(self.n).shape
        found: Any = self.buffer
        if found.dtype != "uint8" or found.shape[-2:] != wanted:
            raise ValueError(
                f"buffer is {found.dtype}{list(found.shape)}, but a weight of k={self.k} and "
                f"n={self.n} in {self.bits} bits with group={self.group} is packed in uint8"
                f"[..., {wanted[0]}, {wanted[1]}]. Pack it with pack_w{self.bits}."
            )


def _looked_up(values: Sequence[int], places: jax.Array, dtype: Any) -> jax.Array:
    table = jnp.asarray(values, dtype)
    return table.at[places.astype(jnp.int32)].get(mode="promise_in_bounds")


# So that programs that jax.export saves can take and return packed weights.
jax.export.register_pytree_node_serialization(
    PackedWeight,
    serialized_name="te_ffi_kernels.PackedWeight",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=lambda text: tuple(json.loads(bytes(text))),
    from_children=lambda aux_data, children: PackedWeight(*children, *aux_data),
)
