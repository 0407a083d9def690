"""Run quantized operations, in inference and training, and programs with stored parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax

import quant_numerics as qn
from hijax_trace import repeated
from interception_core import Engine, OpCall, hides_frames
from quant_numerics import Contraction

from ..errors import QuantizationError
from ..kernels.matmul import ALONE, NOTHING, Added, Between, Clamp
from ..program.arrays import is_stored, unpacked_leaf
from ..program.fused import Joining
from ..program.matching import Rules, Weight, follows_values
from ..program.record import Decided
from ..program.sites import Site, Sites
from ..rules.rule import Sparsity, parse_sparsity, sparsified
from .static.statistics import Statistics, calibrations

Operands = tuple[Any, Any]
Hows = tuple[qn.HowToQuantize | None, qn.HowToQuantize | None]


def contracted(
    contraction: Contraction,
    hows: Hows,
    operands: Operands,
    extras: tuple[Any, ...],
    calibrations: tuple[Any, Any],
    quantized: jax.Array | None = None,
) -> jax.Array:
    """Return ``quantized_contraction``, which joins additions if its kernel may do them.

    ``quantized`` is its activation as int8, where that is known.
    """
    if not any(qn.is_form(x) and x.can_add for x in operands):
        static = contraction, hows
        return repeated(quantized_contraction, static, *operands, extras, calibrations)
    leaves, treedef = jax.tree.flatten((*operands, extras, calibrations, quantized))
    return repeated(_ADDING.of(_Call(contraction, hows, treedef)), (), *leaves)


class _Call(NamedTuple):
    """A contraction of flat operands, and what is added: a bias, a residual, or both, last.

    The sum is cut by ``clamp``, if that is given. If results are ``rounded`` to int8, the last of
    all is their scale.
    """

    contraction: Contraction
    hows: Hows
    treedef: Any
    has_bias: bool = False
    has_residual: bool = False
    clamp: Clamp | None = None
    rounded: bool = False


def _run(call: _Call, *leaves: jax.Array) -> jax.Array:
    *rest, y_scale = leaves if call.rounded else (*leaves, None)
    *rest, residual = rest if call.has_residual else (*rest, None)
    *rest, bias = rest if call.has_bias else (*rest, None)
    lhs, rhs, extras, calibrations, quantized = jax.tree.unflatten(call.treedef, rest)
    given = lhs, rhs, extras, calibrations
    added = Added(bias, residual, call.clamp)
    if y_scale is not None:
        return _rounded(call, *given, added, Between(quantized, y_scale))
    inline = quantized_contraction.__wrapped__  # pyrefly: ignore[missing-attribute]
    return inline(call.contraction, call.hows, *given, added, quantized)


def _rounded(
    call: _Call,
    lhs: Any,
    rhs: Any,
    extras: tuple[Any, ...],
    calibrations: tuple[Any, Any],
    added: Added,
    between: Between,
) -> jax.Array:
    """Return int8 results, which have no derivative: see ``_in_int8``."""
    given = jax.lax.stop_gradient((lhs, rhs, extras, calibrations, added, between))
    lhs, rhs, extras, calibrations, added, between = given
    how = {"how": call.hows[0], "calibration": calibrations[0], "extras": extras, "added": added}
    found = rhs.contract(call.contraction, 1, lhs, **how, between=between)
    if found is not NotImplemented:
        return found
    inline = quantized_contraction.__wrapped__  # pyrefly: ignore[missing-attribute]
    y = inline(*call[:2], lhs, rhs, extras, calibrations, added, between.quantized)
    return qn.quantize_with(y, "int8", between.y_scale.reshape((1,) * y.ndim)).qvalue


def _join(call: _Call, primitive: str, is_row: bool, is_whole: bool) -> _Call | None:
    if primitive != "add" or call.has_residual or call.clamp is not None:
        return None
    # A vector that is added to a vector is both. A bias stays one where a program maps the rows.
    if is_row and not call.has_bias:
        return call._replace(has_bias=True)
    return call._replace(has_residual=True) if is_whole else None


def _cut(call: _Call, primitive: str, numbers: Sequence[float]) -> _Call | None:
    clamp, inf = call.clamp, float("inf")
    if primitive == "clamp" and clamp is None:
        found = Clamp(numbers[0], numbers[1], True)
    elif primitive == "clamp" or (clamp is not None and clamp.is_open):
        return None
    else:  # a maximum, a minimum, or one after the other
        least, most = (-inf, inf) if clamp is None else clamp[:2]
        if (least if primitive == "max" else -most) != -inf:
            return None
        (number,) = numbers
        found = Clamp(number, most, False) if primitive == "max" else Clamp(least, number, False)
    # Bounds out of their order, or NaN, would not be those of the program.
    return call._replace(clamp=found) if found.least <= found.most else None


_ADDING = Joining("quantized_contraction", _run, _join, _cut)


class _Surveyed(NamedTuple):
    """A contraction of floats that stands for a quantized one while a program is surveyed."""

    op_id: str
    call: _Call


def _join_surveyed(one: _Surveyed, *how: Any) -> _Surveyed | None:
    call = _join(one.call, *how)
    return None if call is None else one._replace(call=call)


def _cut_surveyed(one: _Surveyed, *how: Any) -> _Surveyed | None:
    call = _cut(one.call, *how)
    return None if call is None else one._replace(call=call)


_SURVEYED = Joining(
    "surveyed_contraction",
    lambda one, *leaves: _run(one.call, *leaves),
    _join_surveyed,
    _cut_surveyed,
)


def surveyed(site: Site) -> jax.Array:
    """Return a site's float result, from a call that joins what a kernel's would."""
    leaves, treedef = jax.tree.flatten((*site.operands, site.extras, (None, None), None))
    call = _Call(site.contraction, (None, None), treedef)
    return _SURVEYED.of(_Surveyed(site.call.op_id, call))(*leaves)


def maker_of(site: Site) -> str | None:
    """Return the id of the surveyed contraction that made an activation for a site alone."""
    made = site.call.made_by(site.operands[0])
    one = None if made is None else _SURVEYED.static(made.name)
    return None if one is None else one.op_id


def _in_int8(site: Site, range_: qn.Calibration | None) -> jax.Array | None:
    """Return a convolution's activation in its static range, as the convolution before gives it.

    That one is called a second time, for int8 results. Of the two calls only one is compiled: that
    for floats where a program differentiates, the other elsewhere.

    Args:
        site: the convolution.
        range_: of its activation.

    Returns:
        int8 of the activation's shape; None where no convolution made the activation for this one
        alone, or a kernel of either has no int8 beside its floats.
    """
    x, held = site.operands[0], site.call.proxy(site.operands[1])
    made = site.call.made_by(x)
    before = None if made is None else _ADDING.static(made.name)
    if made is None or before is None or range_ is None or range_.lower is not None:
        return None
    _, weight = jax.tree.unflatten(before.treedef, made.operands[: before.treedef.num_leaves])[:2]
    if not all(getattr(one, "gives_int8", False) for one in (held, weight)):
        return None
    scale = qn.scale_of(range_, "int8")[0].reshape(())
    return _ADDING.of(before._replace(rounded=True))(*made.operands, scale)


# Jitted so that a model with many equal layers traces it once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def quantized_contraction(
    contraction: Contraction,
    hows: Hows,
    lhs: jax.Array | qn.StoredForm,
    rhs: jax.Array | qn.StoredForm,
    extras: tuple[Any, ...],
    calibrations: tuple[qn.Calibration | None, qn.Calibration | None],
    added: Added = NOTHING,
    quantized_activation: jax.Array | None = None,
) -> jax.Array:
    """Quantize operands that are still float, then run the contraction.

    A stored operand is contracted as its form says: by a kernel, if that computes this contraction,
    or as a QArray. Derivatives, with respect to the operands that are float, are the float
    operation's.

    Args:
        contraction: what to compute.
        hows: how to quantize each operand; None if it stays float or is stored.
        lhs: the left operand.
        rhs: the right operand.
        extras: the contraction's other arrays.
        calibrations: the static range of each operand; None for one that is measured here.
        added: what is added to the result, which a kernel may do as it stores it.
        quantized_activation: the activation that a stored weight is contracted with as int8, for a
            kernel that takes it; its derivatives are those of the float one.
    """

    def plain(operands: Operands) -> list[Any]:
        found = list(operands)
        for side, held in enumerate(operands):
            if qn.is_form(held):
                found[side], found[1 - side] = held.operand(contraction, side, found[1 - side])
        return found

    # All arrays are arguments: a derivative's rule can't close over those of a trace.
    def quantized(
        operands: Operands,
        extras: tuple[Any, ...],
        calibrations: tuple[Any, Any],
        between: Between,
        added: Added,
    ) -> jax.Array:
        for side, held in enumerate(operands):
            if qn.is_form(held):
                other = 1 - side
                how = {"how": hows[other], "calibration": calibrations[other]}
                how |= {"extras": extras, "added": added}
                how |= {} if between.quantized is None else {"between": between}
                found = held.contract(contraction, side, operands[other], **how)
                if found is not NotImplemented:
                    return found
        sides = []
        for i, (x, how, range_) in enumerate(zip(plain(operands), hows, calibrations, strict=True)):
            if how is None:
                sides.append(x)
            elif range_ is None:
                sides.append(contraction.quantize(i, x, how))
            else:
                sides.append(qn.quantize_with(x, how.qtype, *qn.scale_of(range_, how.qtype)))
        return added.to(contraction.run(*sides, *extras))

    def in_float(operands: Operands, extras: tuple[Any, ...], *others: Any) -> jax.Array:
        *_, added = others
        return added.to(contraction.run(*plain(operands), *extras))

    # What a form does beside the contraction of its quantized values, such as a map of the
    # activation, is exact, and so are its derivatives.
    operands: list[Any] = [lhs, rhs]
    lacks = None
    for side in (0, 1):
        held, x = operands[side], operands[1 - side]
        if qn.is_form(held):
            operands[side], operands[1 - side], one = held.reduced(contraction, side, x, extras)
            lacks = one if lacks is None else lacks if one is None else lacks + one
    stored = any(map(qn.is_form, operands))
    # The backward pass dequantizes again. Otherwise JAX would save a float array for each step of
    # a scan, which is the float model.
    differentiated = jax.checkpoint(in_float) if stored else in_float  # pyrefly: ignore
    run = qn.straight_through(quantized, differentiated)
    if added.clamp is not None:
        run = _cut_where_derived(run)
    given = tuple(operands), extras, calibrations
    if lacks is None:
        return run(*given, Between(quantized_activation), added)
    found = run(*given, ALONE, NOTHING)
    return added.to((found.astype(lacks.dtype) + lacks).astype(found.dtype))


def _cut_where_derived(run: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return a function that cuts after the contraction where it is differentiated.

    What is cut are quantized results, as in the program. The float operation's may lie on the other
    side of a bound.
    """

    @jax.custom_jvp
    def apply(*args: Any) -> jax.Array:
        return run(*args)

    def after(*args: Any) -> jax.Array:
        *operands, added = args
        y = run(*operands, dataclasses.replace(added, clamp=None))
        return Added(clamp=added.clamp).to(y)

    @apply.defjvp
    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        return jax.jvp(after, primals, tangents)

    return apply


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def trained_contraction(
    contraction: Contraction,
    hows: Hows,
    backward: tuple[qn.Backward | None, qn.Backward | None] | None,
    lhs: jax.Array,
    rhs: jax.Array,
    extras: tuple[Any, ...],
    calibrations: tuple[qn.Calibration | None, qn.Calibration | None],
    gradient: qn.Calibration | None,
    key: jax.Array | None,
    quantized: tuple[qn.QArray | None, qn.QArray | None] = (None, None),
) -> jax.Array:
    """Run a contraction of quantized operands, with the gradients of quantized training.

    Of each operand, how it is quantized (None: float), how its gradient is (None: float), and its
    static range (None: measured here), as that of the incoming gradient, and its quantized values
    if they are known. The key is for stochastic rounding.
    """
    if not contraction.trains:
        return quantized_contraction(contraction, hows, lhs, rhs, extras, calibrations)
    return contraction.train(
        lhs,
        rhs,
        *extras,
        lhs_how=hows[0],
        rhs_how=hows[1],
        backward=backward,
        lhs_calibration=calibrations[0],
        rhs_calibration=calibrations[1],
        cotangent_calibration=gradient,
        key=key,
        lhs_quantized=quantized[0],
        rhs_quantized=quantized[1],
    )


P = ParamSpec("P")
R = TypeVar("R")


def inference(
    engine: Engine,
    rules: Rules,
    statistics: Statistics | None = None,
    decided: Decided | None = None,
    **options: Any,
) -> Sites:
    """Return the handlers of functions that run quantized; ``options`` are those of ``Sites``."""
    chained = () if decided is None else decided.chained
    run = functools.partial(run_site, statistics=statistics, chained=chained)
    return Sites(engine, rules, run, is_pure=True, decided=decided, **options)


def infer(sites: Sites, fn: Callable[P, R]) -> Callable[P, R]:
    """Return a function with its operations quantized, for stored parameters or arrays."""
    return taking_stored(sites.tap(fn), follows_values(sites.engine))


def run_site(
    site: Site, statistics: Statistics | None = None, chained: Collection[str] = ()
) -> Any:
    """Return the result of an operation that rules quantize.

    ``chained`` are the ids of those that read int8 results of the one before.
    """
    operands, hows = run_operands(site, map(site.call.proxy, site.operands))
    if not any(hows) and not any(map(qn.is_form, operands)):
        return NotImplemented
    ranges = calibrations(statistics, site) if site.rule.is_static else (None, None)
    quantized = _in_int8(site, ranges[0]) if chained and site.call.op_id in chained else None
    return contracted(site.contraction, hows, operands, site.extras, ranges, quantized)


def taking_stored(fn: Callable[P, R], follows: bool) -> Callable[P, R]:
    """Return ``fn`` for arguments that may hold stored parameters."""

    def one(leaf: Any) -> Any:
        if not is_stored(leaf):
            return leaf
        if not follows:
            kind = getattr(leaf, "qtype", "derived")
            raise QuantizationError(
                f"A parameter is stored as {kind} values, which the patch engine can't hand "
                "to the operations that use it. Use PtqProvider(engine='trace'), or parameters "
                "that are arrays."
            )
        return unpacked_leaf(leaf, kernels=True)

    @hides_frames
    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        args, kwargs = jax.tree.map(one, (args, kwargs), is_leaf=is_stored)
        return fn(*args, **kwargs)

    return call


def run_operands(site: Site, stored: Iterable[Any]) -> tuple[Operands, Hows]:
    """Return what the contraction of a site is run with, and how to quantize what is float of it.

    ``stored`` are the stored forms of its operands, None of those that have none.
    """
    operands, hows, forms = list(site.operands), list(site.hows), list(stored)
    for side, (held, weight) in enumerate(zip(forms, site.weights, strict=True)):
        x, other = operands[side], forms[1 - side]
        # A row that was looked up in a table is an activation. Packed weights take it as an array.
        is_row = weight is None and getattr(other, "platform", None) is not None
        if qn.is_form(held) and not is_row:
            found, how = None, None
            if held.shape == x.shape:
                x_shape = None if other is not None else site.operands[1 - side].shape
                found, how = held.operand_of(site.contraction, side, x_shape, hows[side])
            operands[side] = x if found is None else found.at_op(site.call)
            hows[side] = how
        elif weight is not None and not qn.is_form(held) and _is_given(site.call, x, weight):
            hows[side] = None
        if weight is not None and hows[side] is not None:
            operands[side] = _sparse(site, side, operands[side])
    return tuple(operands), tuple(hows)  # type: ignore[return-value]


def _is_given(call: OpCall, operand: Any, weight: Weight) -> bool:
    """Return whether an array is a weight as it is meant, and is not to be quantized here.

    One with an adapter in it is not the one that a rule quantizes. The array of a stored one is
    quantized already, as where the program differentiates by it: values that were rotated, or have
    minima, would be others if they were rounded again.
    """
    return weight.is_adapted or call.why_no_proxy(operand) is not None


def _sparse(site: Site, side: int, w: Any) -> Any:
    """Return a parameter that is still float with the zeros its rule asks for."""
    if site.rule.sparsity is None:
        return w
    if qn.is_form(w):  # floats with an adapter
        return w.with_values(lambda x: x if qn.is_form(x) else _sparse(site, side, x))
    axis = site.contraction.sparse_axis(side, w.ndim)
    if axis is None:
        return w
    pattern = parse_sparsity(site.rule.sparsity)
    if w.shape[axis] % pattern.m:
        return w
    # The gradient ignores the zeros: straight-through, as for rounding.
    return w + jax.lax.stop_gradient(sparsified(w, Sparsity(pattern, axis)) - w)
