"""HiJAX: high-level types, HiPrims and their rules."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import ad_util as _ad_util  # 0.10.2 - 0.12
from jax._src import hijax as _hijax  # 0.10.2 - 0.12, see below
from jax._src.interpreters import (
    ad,  # 0.10.2 - 0.12
    batching,  # 0.10.2 - 0.12
)
from jax._src.interpreters import mlir as _mlir  # 0.10.2 - 0.12
from jax.extend import core as _extend_core

from .deferred import batch_type
from .trace import mapped

HiTypeBase: type = _hijax.HiType
"""Its errors for missing methods are bare asserts on 0.10.2."""

if not hasattr(_hijax, "HiPrim"):  # 0.10.2
    # vmap of jit reads ``ndim`` to fit shardings, which hi types do not have (jax issue 38125).
    HiTypeBase = type("HiType", (HiTypeBase,), {"ndim": 0, "__module__": __name__})

MappingSpec: type = _hijax.MappingSpec
"""How ``vmap`` or ``scan`` maps a high-level type."""

HiPspecBase: type = _hijax.HiPspec
"""How ``shard_map`` splits a high-level type."""

Zero: type = _ad_util.Zero
"""A tangent that is known to be zero, with its type as ``aval``."""

register_hitype_base: Callable = _hijax.register_hitype

call_hi_primitive_p = _hijax.call_hi_primitive_p
"""The primitive of every HiPrim's application, with the HiPrim as its parameter ``_prim``."""

_solves: Any = importlib.import_module("jax._src.lax.control_flow.solves")  # 0.10.2 - 0.12
ROOT_DERIVATIVE: type | None = getattr(_solves, "_RootLinearMap", None)
"""The HiPrim of the derivative that ``custom_root`` passes to ``tangent_solve``, since 0.11."""


def is_changeable(aval: Any) -> bool:
    """Return whether values of a type may change their types."""
    return bool(getattr(aval, "has_qdd", False))


def lo_types(aval: Any) -> list[Any]:
    """Return the types of the arrays of a type's values."""
    return list(aval.lo_ty()) if aval.is_high else [aval]


def lowered(aval: Any, value: Any) -> list[Any]:
    """Return the arrays of a value."""
    return list(aval.lower_val(value)) if aval.is_high else [value]


def raised(aval: Any, arrays: Sequence[Any]) -> Any:
    """Return the value of a type that consists of arrays."""
    return aval.raise_val(*arrays) if aval.is_high else arrays[0]


def expands(prim: Any) -> bool:
    """Return whether a HiPrim defines ``expand``."""
    base = getattr(_hijax, "HiPrim", None) or _hijax.VJPHiPrimitive
    return type(prim).expand is not base.expand


def cotangents(prim: Any, residuals: Sequence[Any], cotangent: Any) -> Any:
    """Return the cotangents of a HiPrim's operands, by its backward rule.

    Args:
        residuals: the residuals of its forward rule, and structured ones if it has any.
    """
    accums = [accumulator(aval) for aval in prim.in_avals_flat]
    prim.vjp_bwd(*residuals, cotangent, *jax.tree.unflatten(prim.in_tree, accums))
    return jax.tree.unflatten(prim.in_tree, [accum.freeze() for accum in accums])


def accumulator(aval: Any) -> Any:
    """Return an empty accumulator of cotangents for a type."""
    return ad.ValAccum(aval.to_ct_aval())


def is_accumulator(value: Any) -> bool:
    """Return whether a value collects cotangents."""
    return isinstance(value, ad.GradAccum)


def accumulate(accumulators: Any, found: Any) -> None:
    """Add cotangents to a backward rule's accumulators."""
    leaves, treedef = jax.tree.flatten(accumulators)
    for target, one in zip(leaves, treedef.flatten_up_to(found), strict=True):
        if is_accumulator(target):
            target.accum(one)


INFERRED: Any = batching.infer
"""An axis of ``vmap``'s results that JAX finds and returns beside the results."""
SUMMED: Any = batching.sum_axis
"""An axis of a cotangent that is summed."""


instantiate: Callable[[Any], Any] = _ad_util.instantiate
"""Returns a tangent, with zeros instead of a symbolic zero."""
zeros_like_aval: Callable[[Any], Any] = ad.zeros_like_aval
"""Returns the zero of a type; of a hi type, ``vspace_zero()``."""


class PrimitiveBase(_extend_core.Primitive):
    """A ``Primitive`` whose rules are its methods, in JAX's tables."""

    def __init__(self, name: str):
        super().__init__(name)
        ad.primitive_jvps[self] = self._rule("jvp")
        ad.primitive_transposes[self] = self._rule("transpose")
        batching.fancy_primitive_batchers[self] = self._rule("batch")
        # If `is_high` is false, the primitive is lowered with the rest of the program.
        lowering = _mlir.lower_fun(self._rule("to_lojax"), multiple_results=self.multiple_results)
        _mlir.register_lowering(self, lowering)

    def _rule(self, name: str) -> Callable:
        """Return the method of that name, looked up when it is called."""
        return lambda *args, **kwargs: getattr(self, name)(*args, **kwargs)


def _live_ins_optional(dce: Callable) -> Callable:
    """Let ``dce(used_outs, live_ins)`` be called without ``live_ins``: all are live."""

    @functools.wraps(dce)
    def called(self: Any, used_outs: Any, live_ins: Any = None) -> Any:
        if live_ins is None:
            live_ins = jax.tree.unflatten(self.in_tree, [True] * self.in_tree.num_leaves)
        return dce(self, used_outs, live_ins)

    return called


def _residuals_closed_over(remat: Callable) -> Callable:
    """Turn what ``remat`` returns on 0.12 (out, residuals, rem) into (out, rem)."""

    @functools.wraps(remat)
    def called(self: Any, trace: Any, *args: Any) -> Any:
        out, residuals, rem = remat(self, trace, *args)
        return out, lambda *again: rem(residuals, *again)

    return called


if hasattr(_hijax, "vmap_rule"):  # 0.12
    HiPrimBase: type = vars(_hijax)["HiPrim"]
    vmap_rule: Callable = vars(_hijax)["vmap_rule"]
    unmap_avals: Callable = vars(_hijax)["unmap_avals"]
    bdims_at_front: Callable = vars(_hijax)["bdims_at_front"]
else:  # 0.10.2, 0.11.2
    _OlderBase: type = getattr(_hijax, "HiPrim", None) or _hijax.VJPHiPrimitive

    class HiPrimBase(_OlderBase):  # type: ignore[no-redef]
        """``HiPrim`` with the interface of 0.12 on the class that older versions call."""

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            if "dce" in vars(cls):
                cls.dce = _live_ins_optional(vars(cls)["dce"])
            if "remat" in vars(cls):
                cls.remat = _residuals_closed_over(vars(cls)["remat"])

        def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
            """Raise: a class that is mapped must define it."""
            raise NotImplementedError(
                f"for vmap support, subclass {type(self)} must implement `batch`"
            )

        def dce(self, used_outs: Any, live_ins: Any = None) -> Any:
            """Return which operands and results are needed."""
            if self.effects or any(jax.tree.leaves(used_outs)):
                return True, True, self
            return False, False, None

        def pp_params(self) -> dict[str, Any]:
            """Return the parameters to print."""
            return {k: v for k, v in self.params.items() if not k.startswith("_")}

        def __repr__(self) -> str:
            shown = " ".join(f"{k}={v}" for k, v in self.pp_params().items())
            return f"{type(self).__name__}[{shown}]"

    def unmap_avals(axis_data: Any, avals: Any, dims: Any) -> Any:
        """Return the types of whole batches, from those of one example."""
        return jax.tree.map(lambda aval, dim: batch_type(axis_data, dim, aval), avals, dims)

    def bdims_at_front(axis_data: Any, args: Any, dims: Any) -> Any:
        """Return the arguments with the batch axis first, broadcast if needed."""
        return jax.tree.map(
            lambda x, dim: batching.bdim_at_front(
                x, dim, axis_data.size, axis_data.explicit_mesh_axis
            ),
            args,
            dims,
        )

    def vmap_rule(
        axis_data: Any, f: Callable, in_axes: Any, out_axes: Any, *, sum_match: bool = False
    ) -> Callable:
        """Return ``f`` mapped over ``axis_data``, symbolic zeros included."""
        over_arrays = mapped(f, axis_data, in_axes, out_axes, sum_match)
        is_none = lambda x: x is None  # noqa: E731
        zeros_in = functools.partial(_hijax.map_zero, axis_data)
        is_inferred = any(axis is INFERRED for axis in jax.tree.leaves(out_axes))

        def zero_out(axis: Any, value: Any) -> Any:
            open_axis = axis is INFERRED or axis is SUMMED
            return value if open_axis else _hijax.unmap_zero(axis_data, axis, value)

        def batched(*args: Any) -> Any:
            out = over_arrays(*jax.tree.map(zeros_in, in_axes, args, is_leaf=is_none))
            out, found = out if is_inferred else (out, None)
            out = jax.tree.map(zero_out, out_axes, out, is_leaf=is_none)
            return (out, found) if is_inferred else out

        return batched


def native_rule(name: str) -> Any | None:
    """Return JAX's rule such as ``vjp_from_jvp``; None on 0.10.2."""
    return getattr(_hijax, name, None)
