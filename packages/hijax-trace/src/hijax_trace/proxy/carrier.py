"""Carrier: an input together with stored values derived from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from interception_core import JaxtapError

from .array_proxy import ArrayProxy, Lost, is_proxy


class NotStoredError(JaxtapError):
    """A program needs an input of which only derived values are stored.

    Attributes:
        op_id: the operation that needs it.
        paths: the pytree paths of such inputs.
        met: the value that the operation needs, in words.
        replaced: the pytree paths of other inputs, from which stored values were derived, and which
            are arrays now.
    """

    def __init__(self, op_id: str, paths: Sequence[str], met: str, replaced: Sequence[str] = ()):
        self.op_id, self.paths, self.met = op_id, tuple(paths), met
        self.replaced = tuple(replaced)
        text = "and only other values computed from it are stored. Call the program as it was "
        text += "planned, or plan for this call."
        if replaced:
            text = f"which was stored for another {' and '.join(replaced)}. Quantize them together."
        super().__init__(
            f"{op_id} must use values of {' and '.join(paths)} that are stored, got {met}, {text}"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Carrier(ArrayProxy):
    """An input, with array proxies of values derived from it.

    The proxies travel with the input, and with values that are computed from it, into loops and
    calls. When the program computes a value whose ``Expression.key`` is that of a proxy, the proxy
    stands for the value from there on, as if it was an input.

    Attributes:
        own: the input: an array, an array proxy, or None if the program needs only the proxies.
        derived: the proxies, by the expression key of the value that each stands for. The proxy of
            a value inside loops has the loops' steps as its first axes, the outermost loop first:
            see ``Expression.evaluate``.
        loops: how many of those axes there are, by key (static).
        is_parameter: whether the input of a pytree path is a parameter (static, hashable). The
            proxies do not travel with values that are computed from other inputs.
        shape: the shape of the input (static).
        dtype: the dtype of the input (static).
        inputs: the pytree paths of the inputs that must be array proxies for a derived value to
            count, by key (static): where one is an array, somebody has replaced what was stored.
    """

    own: Any
    derived: Mapping[str, ArrayProxy]
    loops: tuple[tuple[str, int], ...] = dataclasses.field(metadata={"static": True})
    is_parameter: Callable[[str], bool] = dataclasses.field(metadata={"static": True})
    # pyrefly: ignore [bad-override]
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    # pyrefly: ignore [bad-override]
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    inputs: tuple[tuple[str, tuple[str, ...]], ...] = dataclasses.field(
        default=(), metadata={"static": True}
    )

    def restore(self) -> jax.Array:
        """Return the input.

        Raises:
            NotStoredError: nothing of it is stored.
        """
        if self.own is None:
            raise NotStoredError("An operation", ["a parameter"], "the parameter")
        return self.own.restore() if isinstance(self.own, ArrayProxy) else self.own

    def inside(self) -> Carrier:
        """Return this without an input that is a plain array."""
        if isinstance(self.own, ArrayProxy):
            return self
        return dataclasses.replace(self, own=None)

    def at(
        self, others: Sequence[Carrier], key: str, value: Any, own: ArrayProxy | None
    ) -> Carrier:
        """Return the carrier of a value computed from this and others.

        Args:
            others: the carriers of the other inputs.
            key: the key of the value's expression.
            value: its type, with a shape and a dtype.
            own: its proxy, if it is a view of a value with a proxy.
        """
        derived = {k: one for held in (self, *others) for k, one in held.derived.items()}
        loops = dict(pair for held in (self, *others) for pair in held.loops)
        if loops.get(key) == 0:
            own = derived[key]
        return dataclasses.replace(
            self,
            own=own,
            derived=derived,
            loops=tuple(loops.items()),
            shape=tuple(value.shape),
            dtype=value.dtype,
        )

    def step(self, axis: int, is_mapped: bool = False) -> ArrayProxy:
        """Return the carrier for a loop along an axis.

        Args:
            axis: the axis of the input.
            is_mapped: whether the loop is a ``vmap``, which runs the steps at once.

        Returns:
            The carrier of proxies with this loop's steps along axis 0. If there are none, the
            stepped input, or ``Lost``.
        """
        count = self.shape[axis]
        own = self.own.step(axis, is_mapped) if isinstance(self.own, ArrayProxy) else None
        stepped = {
            key: self.derived[key].step(0, is_mapped)
            for key, n in self.loops
            if n and self.derived[key].shape[0] == count
        }
        stepped = {key: one for key, one in stepped.items() if not isinstance(one, Lost)}
        left = {key: n - 1 for key, n in self.loops if key in stepped}
        shape = (*self.shape[:axis], *self.shape[axis + 1 :])
        if not left:
            return own or Lost(shape, self.dtype, "nothing is derived from a step of it")
        return dataclasses.replace(
            self,
            own=own,
            derived=stepped,
            loops=tuple(left.items()),
            shape=shape,
        )


def without_replaced(
    held: Mapping[int, ArrayProxy], given: Mapping[str, Any]
) -> tuple[dict[int, ArrayProxy], frozenset[str]]:
    """Drop derived values whose inputs are no longer those that were stored.

    Returns:
        The array proxies; and the paths of the inputs that were replaced by arrays.
    """
    found, replaced = dict(held), set[str]()
    for i, one in held.items():
        if type(one) is not Carrier:
            continue
        lost = {key: {path for path in paths if not is_proxy(given.get(path))}
                for key, paths in one.inputs}  # fmt: skip
        dropped = {key for key, paths in lost.items() if paths}
        replaced.update(*lost.values())
        if dropped:
            found[i] = dataclasses.replace(
                one,
                derived={key: x for key, x in one.derived.items() if key not in dropped},
                loops=tuple(pair for pair in one.loops if pair[0] not in dropped),
            )
    return found, frozenset(replaced & given.keys())


def proxy_of(held: ArrayProxy | None) -> ArrayProxy | None:
    """Return the proxy of a value itself, without derived values."""
    # Asked for each operand: isinstance of an abstract class costs ten times as much.
    return held.own if type(held) is Carrier else held
