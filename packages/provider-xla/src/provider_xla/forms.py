"""Stored parameters that hold another form, and adapters: floats trained beside a parameter."""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.export
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey

import quant_numerics as qn
from hijax_trace import Carrier

from .errors import QuantizationError
from .extras import feature
from .program.arrays import is_stored, map_params
from .program.matching import Under


def _encoded(is_parameter: Any) -> str:
    """Return which inputs are parameters, as text."""
    if not isinstance(is_parameter, Under):
        raise QuantizationError(
            "A parameter with derived weights must be one that plan.quantize returned to be "
            f"exported, got one with is_parameter={is_parameter!r}. Quantize it by a plan."
        )
    return is_parameter.prefix


qn.register_serialization(Carrier, _encoded, Under)


@dataclasses.dataclass(frozen=True, eq=False)
class AroundStored(qn.StoredForm):
    """Base of stored parameters that hold a form, ``inner``, and more.

    Attributes:
        inner: a QArray, PackedQArray or PrepackedWeight.
    """

    inner: Any

    @property
    # pyrefly: ignore [bad-override]
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return self.inner.shape

    @property
    # pyrefly: ignore [bad-override]
    def dtype(self) -> np.dtype:
        """Float dtype of the parameter."""
        return self.inner.dtype

    @property
    # pyrefly: ignore [bad-override]
    def qtype(self) -> str:
        """Name of the quantized type."""
        return self.inner.qtype

    @property
    # pyrefly: ignore [bad-override]
    def platform(self) -> str | None:
        """Return the platform whose kernels alone read its quantized values, or None."""
        return self.inner.platform

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Return the shape of the scales of ``inner``."""
        return self.inner.scale_shape

    @property
    def values(self) -> qn.StoredForm:
        """Return the form that holds the quantized values."""
        return self.inner.values

    def with_values(self, change: Callable[[Any], Any]) -> Self:
        """Return it around another form."""
        return dataclasses.replace(self, inner=self.inner.with_values(change))

    def unpacked(self) -> Self:
        """Return it around a QArray."""
        return dataclasses.replace(self, inner=self.inner.unpacked())

    def portable(self, scale_shape: Sequence[int] | None = None) -> Self:
        """Return it around a form in no kernel's layout; see ``StoredForm``."""
        return dataclasses.replace(self, inner=self.inner.portable(scale_shape))

    def takes(self, contraction: qn.Contraction, side: int, x_shape: Sequence[int] | None) -> bool:
        """Return whether it can be an operand: the other one must be an array."""
        return x_shape is not None and self.inner.takes(contraction, side, x_shape)

    @property
    def can_add(self) -> bool:
        """Return whether a kernel of ``inner`` may add to the result."""
        return self.inner.can_add


@dataclasses.dataclass(frozen=True)
class AdapterForm(abc.ABC):
    """What a kind of adapter computes for one parameter: a frozen dataclass of JSON's types.

    Equal parameters have equal forms, wherever they are. A feature ``adapter-KIND`` is the class,
    so that a process that has not imported it can run exported programs.

    Attributes:
        kind: names it in exported programs, and the variables of models.
        shape: of the parameter.
    """

    kind: ClassVar[str]
    shape: tuple[int, ...]

    @property
    @abc.abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of its arrays, by name."""

    @property
    def label(self) -> str:
        """What plans call it, such as ``"rank 8"``."""
        return self.kind

    @property
    def axes(self) -> Mapping[str, tuple[int | None, ...]]:
        """By name of an array, the axis of the parameter that each of its axes is; None for others.

        In models, these axes have the sharding metadata of the parameter's. Arrays without an entry
        have none.
        """
        return {}

    def named_axes(self, name: str, names: Any) -> tuple[Any, ...] | None:
        """Return the names of an array's axes for those of the parameter; None without names."""
        axes = self.axes.get(name)
        if axes is None or not isinstance(names, tuple | PartitionSpec):
            return None
        whole = (*names, *(None,) * (len(self.shape) - len(names)))
        return tuple(None if axis is None else whole[axis] for axis in axes)

    @abc.abstractmethod
    def init(self, key: jax.Array, dtype: Any) -> dict[str, jax.Array]:
        """Return arrays that change nothing, of ``shapes`` in a float dtype."""

    @abc.abstractmethod
    def merged(self, w: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
        """Return the parameter with the adapter in it, in the dtype of ``w``."""

    @abc.abstractmethod
    def carried(
        self, base: Any, arrays: Mapping[str, jax.Array], key: jax.Array | None
    ) -> qn.StoredForm:
        """Return the parameter and its adapter as they travel through a program.

        Args:
            base: the parameter, an array or a stored form.
            arrays: those of the adapter.
            key: the parameter's random key in training, such as for dropout; None without one.
        """


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class AdaptedWeight:
    """A parameter that has an adapter. A pytree of its arrays.

    Attributes:
        base: the parameter, an array or stored; None where another leaf holds it.
        arrays: those of the adapter, float, by the names of ``form.shapes``.
        form: how they change the parameter (static).
    """

    base: Any
    arrays: Mapping[str, Any]
    form: AdapterForm

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return self.form.shape

    @property
    def ndim(self) -> int:
        """Number of its axes."""
        return len(self.form.shape)

    @property
    def size(self) -> int:
        """Number of its elements."""
        return math.prod(self.form.shape)

    @property
    def dtype(self) -> Any:
        """Return its dtype."""
        return self.base.dtype

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the parameter and the arrays, and what else it has: the form, their names."""
        return (self.base, *self.arrays.values()), (self.form, *self.arrays)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[GetAttrKey, Any]], tuple[Any, ...]]:
        """Return the parameter and the arrays as attributes, and what else it has."""
        children, static = self.tree_flatten()
        names = ("base", *self.arrays)
        return [(GetAttrKey(n), x) for n, x in zip(names, children, strict=True)], static

    @classmethod
    def tree_unflatten(cls, aux_data: Any, children: Sequence[Any]) -> Self:
        """Return it with other arrays."""
        form, *names = aux_data
        base, *arrays = children
        return cls(base, dict(zip(names, arrays, strict=True)), form)


def _written(static: tuple[Any, ...]) -> bytes:
    form, *_ = static
    # An older file has no kind: it is LoRA's.
    return json.dumps({"form": {"other": {"kind": form.kind} | dataclasses.asdict(form)}}).encode()


def _read(text: bytes | bytearray) -> tuple[Any, ...]:
    fields = json.loads(bytes(text))["form"]["other"]
    kind = feature(f"adapter-{fields.pop('kind', 'lora')}")
    listed = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
    form = kind(**listed)
    return (form, *form.shapes)


qn.register_state(AdaptedWeight)
jax.export.register_pytree_node_serialization(
    AdaptedWeight,
    serialized_name="provider_xla.AdaptedWeight",
    serialize_auxdata=_written,
    deserialize_auxdata=_read,
    from_children=AdaptedWeight.tree_unflatten,
)


def is_adapted(node: Any) -> bool:
    """Return whether a node of parameters has an adapter."""
    return isinstance(node, AdaptedWeight)


def is_kept(node: Any) -> bool:
    """Return whether a node of parameters is stored, or has an adapter."""
    return is_stored(node) or is_adapted(node)


def adapter_mask(tree: Any) -> Any:
    """Return a tree of bools: True for the arrays of adapters.

    It is a filter for ``equinox.partition`` and a mask for ``optax.masked``.

    Args:
        tree: parameters, such as an Equinox model or the variables of a Linen module.
    """

    def one(leaf: Any) -> Any:
        if not is_adapted(leaf):
            return False
        arrays = jax.tree.map(lambda _: True, leaf.arrays)  # some frameworks box them
        return AdaptedWeight(False, arrays, leaf.form)

    return jax.tree.map(one, tree, is_leaf=is_adapted)


def restored(params: Any, prefix: str) -> Any:
    """Return float parameters: adapters are merged, stored values dequantized.

    Raises:
        QuantizationError: of a parameter nothing but derived weights is stored.
    """
    return map_params(_restored_leaf, params, prefix, is_kept)


def _restored_leaf(path: str, leaf: Any) -> Any:
    base = leaf.base if is_adapted(leaf) else leaf
    if isinstance(base, Carrier):
        if base.own is None:
            do = "merge the adapters into them" if is_adapted(leaf) else "keep them"
            raise QuantizationError(
                f"{path} is stored only as what the program computes from it, which can't be "
                f"undone. Take the float parameters, and {do}."
            )
        base = base.own
    base = _dequantized(base) if is_stored(base) else base
    return _merged(leaf.form, base, leaf.arrays) if is_adapted(leaf) else base


@jax.jit
def _dequantized(leaf: Any) -> jax.Array:
    return leaf.restore()


@functools.partial(jax.jit, static_argnums=0)
def _merged(form: AdapterForm, w: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
    return form.merged(w, arrays)
