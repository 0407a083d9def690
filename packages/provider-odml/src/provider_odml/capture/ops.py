"""The op table: what LiteRT's integer kernels ask of the scales of each operation.

The kinds follow LiteRT's 8-bit quantization specification
(https://ai.google.dev/edge/litert/conversion/tensorflow/quantization/quantization_spec).
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives

from interception_core import loaded, primitive_names

PRIMITIVE = "primitive:"


class Scales(enum.Enum):
    """What LiteRT's integer kernel of an operation asks of the scales."""

    CONTRACTION = enum.auto()
    """A matmul or convolution; with a parameter, what follows may be fused into it."""
    ARITHMETIC = enum.auto()
    """Each input and the output has a scale; fused where a constant meets a contraction."""
    NORM = enum.auto()
    """BatchNorm: folded into a contraction before it, computed in float elsewhere."""
    OWN = enum.auto()
    """Each input and the output has a scale."""
    CLAMP = enum.auto()
    """The output's scale is the input's, too; fused into what computes the input."""
    JOIN = enum.auto()
    """The output's scale is that of all inputs, too."""
    PICK = enum.auto()
    """The input's scale is the output's: values are picked from the input."""
    AVERAGE = enum.auto()
    """The input's scale is the output's, which is rounded to it."""
    LOOKUP = enum.auto()
    """Rows of a table, which has one scale."""


class NoKernel(enum.Enum):
    """Why LiteRT has no integer kernel for an operation."""

    FLOAT = enum.auto()
    """LiteRT computes it in float."""
    UNKNOWN = enum.auto()
    """The table of operations does not list it."""


class Passage(enum.Enum):
    """What a tapped call means if it is not a device operation."""

    NAME = enum.auto()
    """Let run: it only gives the operations in it a name for rules."""
    VIEW = enum.auto()
    """The same values in another form: the same tensor to LiteRT."""
    BEGIN = enum.auto()
    """The begin of a marked operation."""
    OUTPUT = enum.auto()
    """An output of the model."""


Kind = Scales | NoKernel | Passage
"""What an operation is to a plan."""


@dataclass(frozen=True)
class Op:
    """An operation that is tapped.

    Attributes:
        name: what rules call it.
        kind: how it is quantized.
        target: what is tapped.
        fixed: the range of its output, where that is known before: LiteRT asks for it.
        operands: the names or positions of the arrays that it is about.
    """

    name: str
    kind: Kind
    target: str
    fixed: tuple[float, float] | None = None
    operands: tuple[int | str, ...] | None = None

    @property
    def is_primitive(self) -> bool:
        """Whether it is a primitive, not a function."""
        return self.target.startswith(PRIMITIVE)

    def slots(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int | str]:
        """Return where in the arguments its arrays are."""
        if self.operands is None:
            return [i for i, arg in enumerate(args) if is_float(arg)]
        found: list[int | str] = []
        for place in self.operands:
            if (isinstance(place, int) and place < len(args) and is_float(args[place])) or (
                isinstance(place, str) and is_float(kwargs.get(place))
            ):
                found.append(place)
        return found


def is_float(value: Any) -> bool:
    """Return whether a value is an array of floats."""
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    return is_array and jnp.issubdtype(value.dtype, jnp.floating)


_UNIT = (0.0, 255 / 256)
"""LiteRT gives softmax and logistic the scale 1/256 and the zero point -128."""
_SYMMETRIC = (-1.0, 127 / 128)
"""LiteRT gives tanh the scale 1/128 and the zero point 0."""


def _primitives(kind: Kind, *names: str, **options: Any) -> list[Op]:
    return [Op(_RULE_NAMES.get(n, n), kind, PRIMITIVE + n, **options) for n in names]


_RULE_NAMES = {"div": "truediv", "reduce_sum": "sum", "integer_pow": "pow", "gather": "take",
               "stack": "concatenate"}  # fmt: skip

_PRIMITIVES = [
    *_primitives(Scales.CONTRACTION, "dot_general", "conv_general_dilated"),
    *_primitives(Scales.ARITHMETIC, "add", "sub", "mul", "div"),
    *_primitives(Scales.OWN, "tanh", fixed=_SYMMETRIC),
    *_primitives(Scales.OWN, "logistic", fixed=_UNIT),
    *_primitives(Scales.OWN, "neg", "integer_pow", "pow", "square", "abs", "reduce_sum"),
    *_primitives(Scales.CLAMP, "max", "min", "clamp", "pad"),
    *_primitives(Scales.JOIN, "concatenate", "stack", "select_n", "dynamic_update_slice"),
    *_primitives(Scales.PICK, "reduce_max", "reduce_min", "reduce_window_max", "reduce_window_min"),
    *_primitives(Scales.LOOKUP, "gather"),
    *_primitives(
        Passage.VIEW,
        *("reshape", "transpose", "broadcast_in_dim", "squeeze", "rev", "slice", "dynamic_slice"),
        *("copy", "convert_element_type", "split", "name", "sharding_constraint", "real"),
        *("reduce_precision", "device_put", "stop_gradient", "optimization_barrier"),
    ),
    *_primitives(
        NoKernel.FLOAT,
        *("sin", "cos", "tan", "exp", "exp2", "log", "log1p", "expm1", "sqrt", "rsqrt", "cbrt"),
        *("erf", "floor", "ceil", "round", "sign", "rem", "eq", "ne", "lt", "le", "gt", "ge"),
        *("is_finite", "argmax", "argmin", "cumsum", "reduce_window_sum"),
        *("reduce_prod", "nextafter", "atan2", "not", "and", "or", "iota"),
    ),
]

_HOLDS_A_PROGRAM = frozenset(
    {"call", "closed_call", "jit", "pjit", "scan", "while", "cond", "remat", "remat2", "checkpoint"}
    | {"custom_jvp_call", "custom_vjp_call", "custom_lin", "linear_solve", "custom_linear_solve"}
    | {"run_state", "get", "swap", "addupdate", "shard_map"}
)
"""Primitives that an engine looks into, or that are none of the model's operations."""


RANDOM = frozenset(
    {"random_bits", "random_seed", "random_split", "random_fold_in", "random_gamma"}
    | {"threefry2x32", "rng_bit_generator", "rng_uniform", "random_wrap", "random_unwrap"}
)
"""Primitives whose results are none of the model's tensors, whatever the key is made of."""


def _unknown() -> list[Op]:
    """Return the primitives that are not in the table: no integer kernel is known for them."""
    table = {op.target.removeprefix(PRIMITIVE) for op in _PRIMITIVES} | _HOLDS_A_PROGRAM
    public = {p.name for p in vars(primitives).values() if hasattr(p, "bind")}
    return _primitives(NoKernel.UNKNOWN, *sorted(public - table))


_FUNCTIONS = [
    Op("softmax", Scales.OWN, "jax.nn.softmax", fixed=_UNIT, operands=(0, "x")),
    Op("log_softmax", Scales.OWN, "jax.nn.log_softmax", operands=(0, "x")),
    Op("gelu", Scales.OWN, "jax.nn.gelu", operands=(0, "x")),
    Op("leaky_relu", Scales.OWN, "jax.nn.leaky_relu", operands=(0, "x")),
    Op("elu", Scales.OWN, "jax.nn.elu", operands=(0, "x")),
    Op("selu", Scales.OWN, "jax.nn.selu", operands=(0, "x")),
    Op("softplus", Scales.OWN, "jax.nn.softplus", operands=(0, "x")),
    Op("hard_swish", Scales.OWN, "jax.nn.hard_silu", operands=(0, "x")),
    Op("mean", Scales.OWN, "jax.numpy.mean", operands=(0, "a")),
    Op("var", Scales.OWN, "jax.numpy.var", operands=(0, "a")),
    Op("standardize", Scales.OWN, "jax.nn.standardize", operands=(0, "x")),
    Op("clip", Scales.CLAMP, "jax.numpy.clip", operands=(0, "arr")),
    Op("pad", Scales.CLAMP, "jax.numpy.pad", operands=(0, "array")),
    Op("repeat", Scales.PICK, "jax.numpy.repeat", operands=(0, "a")),
    Op("resize", Scales.AVERAGE, "jax.image.resize", operands=(0, "image")),
    Op("einsum", Passage.NAME, "jax.numpy.einsum"),
    Op("dot", Passage.NAME, "jax.numpy.dot"),
    Op("matmul", Passage.NAME, "jax.numpy.matmul"),
    Op("silu", Passage.NAME, "jax.nn.silu"),
    Op("relu", Scales.CLAMP, "jax.nn.relu", operands=(0, "x")),
    Op("relu6", Scales.CLAMP, "jax.nn.relu6", operands=(0, "x")),
]

_OUTPUT = Op("output", Passage.OUTPUT, "provider_odml.capture.module_calls.model_output")


MARKS = "provider_odml.capture.module_calls."
"""Begins the targets that are marks."""


def _marked(name: str, kind: Kind) -> list[Op]:
    return [Op(name, Passage.BEGIN, f"{MARKS}{name}_begin"), Op(name, kind, f"{MARKS}{name}")]


_MARKED = [
    *_marked("norm_op", Scales.OWN),
    *_marked("batch_norm_op", Scales.NORM),
    *_marked("dropout", Passage.VIEW),
    *_marked("avg_pool", Scales.AVERAGE),
    *_marked("max_pool", Scales.PICK),
]

_NORMS = ("LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm")
_METHODS = {
    "flax.linen": {"norm_op": _NORMS, "batch_norm_op": ("BatchNorm",), "dropout": ("Dropout",)},
    "flax.nnx": {"norm_op": _NORMS, "batch_norm_op": ("BatchNorm",), "dropout": ("Dropout",)},
    "equinox.nn": {
        "norm_op": _NORMS,
        "batch_norm_op": ("BatchNorm",),
        "dropout": ("Dropout",),
        "avg_pool": ("AvgPool1d", "AvgPool2d"),
        "max_pool": ("MaxPool1d", "MaxPool2d"),
    },
}
"""Methods that marks are put around: by package and name of the mark, the classes."""

_POOLS = [
    Op("avg_pool", Scales.AVERAGE, "flax.linen.avg_pool", operands=(0, "inputs")),
    Op("max_pool", Scales.PICK, "flax.linen.max_pool", operands=(0, "inputs")),
]

DEPTHWISE = "depthwise_conv"
"""What rules call a convolution with as many groups as input channels, beside its other name."""

OP_NAMES = frozenset(
    op.name
    for op in (*_PRIMITIVES, *_FUNCTIONS, *_MARKED)
    if op.kind not in (Passage.VIEW, NoKernel.UNKNOWN, Passage.BEGIN)
) | {DEPTHWISE}
"""The operations that rules can name."""


def ops() -> dict[str, Op]:
    """Return the operations by target: those of a framework where that is imported."""
    found = [*_primitives_here(), *_FUNCTIONS, *_MARKED, _OUTPUT]
    found += [op for op in _POOLS if loaded(op.target) is not None]
    return {op.target: op for op in found}


@functools.cache
def _primitives_here() -> tuple[Op, ...]:
    """Return the primitives that this JAX has. Made once: models ask at each call."""
    known = primitive_names()
    found = [*_PRIMITIVES, *_unknown()]
    return tuple(op for op in found if op.target.removeprefix(PRIMITIVE) in known)


def methods() -> dict[str, str]:
    """Return the methods that marks are put around, with the marks' names."""
    return {
        target: name
        for package, of_package in _METHODS.items()
        for name, classes in of_package.items()
        for target in (f"{package}.{c}.__call__" for c in classes)
        if loaded(target) is not None
    }
