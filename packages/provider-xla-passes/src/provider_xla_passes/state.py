"""Weight: a parameter on its way through the passes. Pass: what all of them have in common."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from provider_xla import WeightPlan
from provider_xla.features import Sparsity, kept

from .layout import Layout
from .transformed import Step, TransformedWeight


class Grid(NamedTuple):
    """What quantized values are chosen on.

    Attributes:
        q: the parameter, rounded.
        scale: of each element, float32 [S, K, N].
        zero_point: the same, or None.
        keep: which elements stay, bool [S, K, N], or None.
    """

    q: qn.QArray
    scale: jax.Array
    zero_point: jax.Array | None
    keep: jax.Array | None


@dataclasses.dataclass(eq=False)
class Weight:
    """A parameter with statistics of its activations. Passes change it in place.

    Attributes:
        path: its pytree path.
        below: its path within the parameters, as rules write it.
        plan: how it is quantized.
        layout: how it is seen as [S, K, N]: steps of loops, contracted axes, other axes.
        w: its values so far, transformed, float32 [S, K, N].
        gram: the Gram matrix of the activations that it is multiplied with, transformed: the sum
            of ``x.T @ x`` over the rows of all contractions and batches, float32 [S, K, K].
        peaks: the largest magnitude of each channel of the activations, float32 [S, K]; None if
            no pass needs it now.
        steps: the maps that activations go through, in order.
        keep: which elements stay, bool [S, K, N], if a pass has chosen zeros; else None.
        ranges: the ranges that scales are for, if a pass has chosen them; None for the rule's.
        chosen: the quantized values that a pass has chosen, float32 [K, N] by step; others are
            rounded.
    """

    path: str
    below: str
    plan: WeightPlan
    layout: Layout
    w: jax.Array
    gram: jax.Array
    peaks: jax.Array | None = None
    steps: list[Step] = dataclasses.field(default_factory=list)
    keep: jax.Array | None = None
    ranges: qn.Calibration | None = None
    chosen: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    _grid: Grid | None = dataclasses.field(default=None, init=False)

    def __post_init__(self):
        # The squared norm of the results, which no map changes: errors are relative to it.
        self._size = output_squares(self.w, self.gram).sum()

    def transform(self, step: Step) -> None:
        """Transform the parameter, and its activations with it."""
        self.w, self.gram = _weight(step, self.w), _mapped(step, self.gram)
        self.steps.append(step)
        self.peaks = self.ranges = self._grid = None

    def mapped(self, gram: jax.Array) -> jax.Array:
        """Return the Gram matrices of activations before the maps, [S, K, K], after them."""
        for step in self.steps:
            gram = _mapped(step, gram)
        return gram

    def mask(self, w: jax.Array | None = None) -> jax.Array | None:
        """Return which elements stay, bool [S, K, N]; None for all."""
        if self.keep is not None or self.plan.sparsity is None:
            return self.keep
        return mask_of(jnp.abs(self.w if w is None else w), self.layout, self.plan.sparsity)

    def rounded(self, w: jax.Array | None = None) -> qn.QArray:
        """Return it, or another [S, K, N], rounded with the rule's zeros.

        The result has the shape of the parameter, and stands for float32.
        """
        w = self.w if w is None else w
        mask = self.mask(w)
        return quantized(w if mask is None else jnp.where(mask, w, 0), self)

    def grid(self) -> Grid:
        """Return what quantized values are chosen on: made once, for all steps."""
        if self._grid is None:
            q = self.rounded()
            scale, zero_point = _spread(q)
            if zero_point is not None:
                zero_point = self.layout.matrices(zero_point)
            self._grid = Grid(q, self.layout.matrices(scale), zero_point, self.mask())
        return self._grid

    def choose(self, step: int, qvalue: jax.Array) -> None:
        """Set the quantized values of one step, [K, N]."""
        self.chosen[step] = qvalue

    def quantized(self) -> qn.QArray:
        """Return its current quantized values, in the parameter's shape."""
        if not self.chosen:
            return self.rounded()
        q = self.grid().q
        qvalue = self.layout.matrices(q.qvalue)
        chosen = [self.chosen.get(i, one) for i, one in enumerate(qvalue)]
        dtype = q.qvalue.dtype
        chosen = jnp.stack([x.astype(dtype) for x in chosen])
        return dataclasses.replace(q, qvalue=self.layout.array(chosen))

    def so_far(self) -> jax.Array:
        """Return the parameter, with the steps dequantized whose quantized values are chosen."""
        found = self.layout.matrices(qn.dequantize(self.quantized()))
        is_chosen = np.isin(np.arange(len(found)), [*self.chosen])
        found = jnp.where(is_chosen[:, None, None], found, self.w)
        for step in reversed(self.steps):
            found = step.back(found)
        return self.layout.array(found)

    def errors(self, q: qn.QArray | None = None) -> jax.Array:
        """Return the squared error of the contractions' results by step, float32 [S]."""
        q = self.quantized() if q is None else q
        return output_squares(difference(self.w, q, self.layout), self.gram)

    def error(self) -> float:
        """Return the relative root mean squared error of the results."""
        size = float(self._size)
        return (float(self.errors().sum()) / size) ** 0.5 if size > 0 else 0.0

    def stored(self) -> Any:
        """Return it as ``plan.apply`` takes it."""
        q = self.quantized().astype(self.plan.dtype)
        q = qn.pack(q) if qn.get_qtype(q.qtype).packable else q
        if not self.steps:
            return q

        def led(x: jax.Array) -> jax.Array:
            return x.reshape(*self.layout.steps, self.layout.k)

        ndim = len(self.layout.shape)
        k_axes = tuple(axis - ndim for axis in self.layout.k_axes)
        return TransformedWeight(q, tuple(jax.tree.map(led, self.steps)), k_axes)


@jax.jit
def _weight(step: Step, w: jax.Array) -> jax.Array:
    return step.weight(w)


@jax.jit
def _mapped(step: Step, gram: jax.Array) -> jax.Array:
    # The Gram matrix of x @ T is T.T @ G @ T: both of its axes are mapped like activations.
    arrays, treedef = jax.tree.flatten(step)
    of_rows = jax.tree.unflatten(treedef, [x[:, None] for x in arrays])
    return of_rows.forward(jnp.swapaxes(of_rows.forward(gram), -1, -2))


@jax.jit
def output_squares(w: jax.Array, gram: jax.Array) -> jax.Array:
    """Return the squared norm of results from a Gram matrix, [S]."""
    return jnp.maximum(jnp.sum(w * jnp.matmul(gram, w, precision="highest"), axis=(1, 2)), 0)


@functools.partial(jax.jit, static_argnums=2)
def difference(w: jax.Array, q: qn.QArray, layout: Layout) -> jax.Array:
    """Return [S, K, N] minus what a QArray represents."""
    return w - layout.matrices(qn.dequantize(q))


@functools.partial(jax.jit, static_argnums=(1, 2))
def mask_of(score: jax.Array, layout: Layout, sparsity: Sparsity) -> jax.Array:
    """Return which elements of [S, K, N] stay, by their scores."""
    return layout.matrices(kept(layout.array(score), sparsity.pattern, sparsity.axis))


def quantized(w: jax.Array, weight: Weight) -> qn.QArray:
    """Return [S, K, N] rounded in the shape of the parameter."""
    plan, array = weight.plan, weight.layout.array(w)
    if weight.ranges is not None:
        parts = qn.scale_of(weight.ranges, plan.qtype, plan.scale_dtype)
        return qn.quantize_with(array, plan.qtype, *parts, tile_axes=plan.granularity.tile_axes)
    return dataclasses.replace(plan, sparsity=None).quantized(array).unpacked()


def _spread(q: qn.QArray) -> tuple[jax.Array, jax.Array | None]:
    """Return scale and zero point per element, in the values' shape."""

    def full(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(q.slices.repeated(x), q.shape)

    scale = q.scale.astype(jnp.float32)
    scale = scale if q.global_scale is None else scale * q.global_scale
    return full(scale), None if q.zero_point is None else full(q.zero_point)


TRANSFORM, MASK, RANGE, ROUND = range(4)


class Pass(abc.ABC):
    """Base of passes, which change one parameter of a plan at a time.

    Attributes:
        stage: ``TRANSFORM``, ``MASK``, ``RANGE`` or ``ROUND``, in the order in which passes must
            come: those that transform channels, the one that chooses zeros, the one that chooses
            ranges, the one that chooses quantized values.
        needs_peaks: whether it reads ``Weight.peaks``, which takes another run over the batches.
        sequential: how many times activations are measured for it, along the depth of the model,
            each time with the parameters before as it rounded them; 0 for those of the float model.
    """

    stage: ClassVar[int]
    needs_peaks: ClassVar[bool] = False
    sequential: int = 0

    @property
    def name(self) -> str:
        """What the report calls it."""
        return type(self).__name__

    @abc.abstractmethod
    def run(self, weight: Weight) -> str | None:
        """Change a parameter; return why it is left alone, or None.

        Args:
            weight: the parameter and the statistics of its activations; changed in place.
        """

    def run_step(self, weight: Weight, step: int, gram: np.ndarray) -> None:
        """Change a parameter in one step of the loops around it, if the pass is ``sequential``.

        Args:
            weight: the parameter; changed in place.
            step: the number of the step; 0 without loops.
            gram: the Gram matrix of its activations in that step, float64 [K, K].
        """
        raise NotImplementedError
