"""Convolutions of activations with packed weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..op import Op, varying_as
from ..packed_weights.config import is_inside
from ..packed_weights.weight import PackedWeight
from ..partition import partition_rows
from . import reference
from .config import Form, form


def conv_w8a8(
    x: jax.Array,
    weight: PackedWeight,
    window: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    dilation: Sequence[int] | None = None,
    groups: int = 1,
    out_dtype: DTypeLike | None = None,
    x_scale: ArrayLike | None = None,
    y_scale: ArrayLike | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    clamp: tuple[float, float] | None = None,
) -> jax.Array:
    """Convolve images, quantized to int8 one by one, with int8 weights.

    Products of quantized values are summed in int32, exactly, and rescaled in float32: times the
    scale of the image, then times that of the output channel (section 2.2 of Jacob et al. 2018,
    arXiv:1712.05877). No window is copied: in a line of an image the elements of a window are
    adjacent, so a kernel multiplies ranges of lines where they lie.

    Args:
        x: [images, *sizes, channels] with 1 to 3 axes of sizes, float32, bfloat16 or float16; or
            int8, quantized values with the scale ``x_scale``.
        weight: packed by ``pack_w8`` from [k, n]: n output channels, and rows for the elements of
            the window, in the order of its axes, times the input channels of a group.
        window: elements of the window along each axis of sizes.
        strides: from window to window; by default 1.
        padding: zeros before and after each axis of sizes, negative where it is cut instead; or
            "SAME", "SAME_LOWER" or "VALID".
        dilation: from element to element of a window; by default 1.
        groups: of input channels, each summed for as many groups of output channels. Kernels are
            for one group, for groups of one input and one output channel, and for groups of whole
            panels of 16 output channels (32 in 4 bits).
        out_dtype: float32, bfloat16 or float16; by default that of x, and float32 for int8.
        x_scale: float32[], the scale of all images; by default each has its own, 1 / 127 of its
            largest magnitude. What is beyond 127 times the scale saturates, and so does an
            infinity; a NaN becomes 0.
        y_scale: float32[]. If given, results are int8: the bits that a convolution with this as its
            ``x_scale`` makes of the results in ``out_dtype``. It then reads a quarter of the bytes,
            and has nothing to quantize. They have no derivative.
        bias: [n], of ``out_dtype``: added to the product, as an addition after it.
        residual: of the result's shape, and ``out_dtype``: added after the bias in the same way.
        clamp: two numbers between which the result is cut in the end: (0, 6) for ``relu6``.

    Returns:
        [images, *sizes, n]. Without ``x_scale`` an image with an infinity or NaN has no finite
        results, but for channels whose weights are all zero. The gradient with respect to x is that
        of the convolution of floats.

    Raises:
        TypeError: another dtype, or a weight that isn't a PackedWeight.
        ValueError: a weight of other bits, of another number of rows, with groups of rows, or a
            stack; or numbers that don't fit the axes of x.
        jax.errors.JaxRuntimeError: when it runs: a weight whose buffer is damaged.
    """
    options = strides, padding, dilation, groups, out_dtype
    more = x_scale, y_scale, bias, residual
    return _convolve("conv_w8a8", 8, x, weight, window, options, more, clamp)


def conv_w4a8(
    x: jax.Array,
    weight: PackedWeight,
    window: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    dilation: Sequence[int] | None = None,
    groups: int = 1,
    out_dtype: DTypeLike | None = None,
    x_scale: ArrayLike | None = None,
    y_scale: ArrayLike | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    clamp: tuple[float, float] | None = None,
) -> jax.Array:
    """Convolve as ``conv_w8a8`` with a weight packed by ``pack_w4``.

    The arguments, results and errors are those of ``conv_w8a8``.
    """
    options = strides, padding, dilation, groups, out_dtype
    more = x_scale, y_scale, bias, residual
    return _convolve("conv_w4a8", 4, x, weight, window, options, more, clamp)


def conv_w8a16(
    x: jax.Array,
    weight: PackedWeight,
    window: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    dilation: Sequence[int] | None = None,
    groups: int = 1,
    out_dtype: DTypeLike | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    clamp: tuple[float, float] | None = None,
) -> jax.Array:
    """Convolve images of floats with int8 weights.

    Products of x and quantized values are summed in float32, and the sum is multiplied with the
    scale of the output channel (section 2.2 of Jacob et al. 2018, arXiv:1712.05877, with one side
    quantized). Kernels are for depthwise convolutions, of which XLA has slow ones. They add a
    window's products one after the other, each with one rounding.

    Args:
        x: [images, *sizes, channels] with 1 to 3 axes of sizes, float32, bfloat16 or float16.
        weight: as in ``conv_w8a8``.
        window: as there, like all arguments that are not listed here.
        strides: as there.
        padding: as there.
        dilation: as there.
        groups: as there.
        out_dtype: float32, bfloat16 or float16; by default that of x.
        bias: as there.
        residual: as there.
        clamp: as there.

    Returns:
        [images, *sizes, n].

    Raises:
        TypeError, ValueError, jax.errors.JaxRuntimeError: as ``conv_w8a8``.
    """
    options = strides, padding, dilation, groups, out_dtype
    more = None, None, bias, residual
    return _convolve("conv_w8a16", 8, x, weight, window, options, more, clamp, quantizes=False)


def conv_w4a16(
    x: jax.Array,
    weight: PackedWeight,
    window: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    dilation: Sequence[int] | None = None,
    groups: int = 1,
    out_dtype: DTypeLike | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    clamp: tuple[float, float] | None = None,
) -> jax.Array:
    """Convolve as ``conv_w8a16`` with a weight packed by ``pack_w4``.

    The arguments, results and errors are those of ``conv_w8a16``.
    """
    options = strides, padding, dilation, groups, out_dtype
    more = None, None, bias, residual
    return _convolve("conv_w4a16", 4, x, weight, window, options, more, clamp, quantizes=False)


def _convolve(
    op: str,
    bits: int,
    x: jax.Array,
    weight: PackedWeight,
    window: Sequence[int],
    options: tuple[Any, Any, Any, Any, Any],
    more: tuple[ArrayLike | None, ArrayLike | None, jax.Array | None, jax.Array | None],
    clamp: tuple[float, float] | None,
    quantizes: bool = True,
) -> jax.Array:
    x = jnp.asarray(x)
    found = form(op, bits, x, weight, window, *options, *more, clamp, quantizes)
    *scales, bias, residual = more
    scales = [None if one is None else jnp.asarray(one, jnp.float32) for one in scales]
    given = [x, weight.buffer, *(one for one in (*scales, bias, residual) if one is not None)]
    if found.to_int8:  # which has no derivative
        given = list(map(lax.stop_gradient, given))
    return _CONVOLUTION(found, *given)


def _results(form: Form, x: jax.Array, *_: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(form.shape(x.shape), form.result_dtype)


def _attributes(form: Form, *_: jax.Array) -> dict[str, Any]:
    return form.attributes


def _asked(form: Form, x: jax.Array, *_: jax.Array) -> Any:
    """Ask as provider-xla does, so that a plan shows what will run."""
    images = jax.ShapeDtypeStruct(x.shape, x.dtype)
    kernel = (*form.window, x.shape[-1] // form.groups, form.n)
    asked = {"groups": form.groups, **form.layout.question}
    return (images, jax.ShapeDtypeStruct(kernel, jnp.int8)), asked


def _partition(
    form: Form, block: Callable[..., jax.Array], x: jax.Array, *operands: jax.Array
) -> Callable[..., jax.Array]:
    """Share images out; each device has the whole weight."""
    sizes = [f"s{i}" for i in range(x.ndim - 2)]
    found = [f"t{i}" for i in range(x.ndim - 2)]
    axes = [["m", *sizes, "c"], ["p", "b"]]
    axes += [[] for _ in range(form.has_scale + form.to_int8)]
    axes += [["n"]] if form.has_bias else []
    axes += [["m", *found, "n"]] if form.has_residual else []
    whole = {*sizes, *found, "c", "p", "b", "n"}
    return partition_rows(lambda *given: block(form, *given), axes, [["m", *found, "n"]], whole)


def _batch(
    run: Any, form: Form, size: int, in_batched: Any, x: jax.Array, *operands: jax.Array
) -> Any:
    """Merge the mapped axis into the images."""
    of_x, *mapped = in_batched
    given, added = form.parted(operands)
    of_given, of_added = form.parted(mapped)
    if any(of_given) or not of_x:
        return NotImplemented
    count = x.shape[1]
    images = x.reshape(size * count, *x.shape[2:])
    inside, after = [], []
    if form.has_bias:
        (after if of_added[0] else inside).append(added[0])
    plain = form.plain()
    if after:  # a bias that differs from example to example
        y = run(plain, images, *form.of_plain(given))
        y = y.reshape(size, count, *plain.shape(images.shape)[1:])
        bias = lax.expand_dims(added[0], range(1, y.ndim - 1))
        rest = added[1:]
        if rest:
            rest = (rest[0] if of_added[1] else rest[0][None],)
        return reference.finish(form, y, given, (bias, *rest)), True
    if form.has_residual:
        last = added[-1] if of_added[-1] else jnp.broadcast_to(added[-1], (size, *added[-1].shape))
        inside.append(last.reshape(size * count, *last.shape[2:]))
    y = run(form, images, *given, *inside)
    return y.reshape(size, count, *y.shape[1:]), True


def _save(form: Form, operands: tuple[jax.Array, ...], y: jax.Array) -> Any:
    x, *given = operands
    # Of x, the gradient needs the type alone; of results, where they were cut.
    return jnp.zeros((0, *x.shape), x.dtype), is_inside(y, form.clamp), *form.parted(given)[0]


def _gradient(form: Form, saved: tuple[Any, ...], ct: jax.Array) -> tuple[Any, ...]:
    like, inside, *given = saved
    if inside is not None:
        ct = jnp.where(inside, ct, jnp.zeros((), ct.dtype))
    wide = ct.astype(jnp.float32)
    axes = tuple(range(ct.ndim - 1))
    added = (wide.sum(axes).astype(ct.dtype),) if form.has_bias else ()
    added += (ct,) if form.has_residual else ()
    if like.dtype == jnp.int8:  # quantized values have no derivative
        return None, *(None for _ in given), *added
    qvalue, scale = form.kernel(PackedWeight.of(given[0], form.n, form.layout))
    kernel = qvalue.astype(jnp.float32) * jnp.expand_dims(scale, range(qvalue.ndim - 1))

    def convolve(x: jax.Array) -> jax.Array:
        # Without it, GPUs multiply float32 in TF32, whose 11 bits are fewer than the kernels keep.
        return form.run(x, kernel, precision=lax.Precision.HIGHEST)

    # In shard_map images vary over devices, though zeros don't.
    (images,) = varying_as((wide,), jnp.zeros(like.shape[1:], jnp.float32))
    (grad,) = jax.linear_transpose(convolve, images)(wide)
    return grad.astype(like.dtype), *(None for _ in given), *added


_CONVOLUTION = Op(
    lambda form: form.op,
    reference.convolve,
    results=_results,
    attributes=_attributes,
    asked=_asked,
    partition=_partition,
    batch=_batch,
    save=_save,
    gradient=_gradient,
)
