"""How an op of this package runs: as a kernel where it's lowered for a platform that has one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from interception_core import (
    KernelSpec,
    kernel_platforms,
    kernel_workspace,
    register_kernel,
    select_kernel,
)


def call(
    op: str,
    reference: Callable[..., Any],
    operands: Sequence[jax.Array],
    results: Any,
    *,
    asked: Sequence[Any] | None = None,
    partition: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    question: dict[str, Any] | None = None,
    **attributes: Any,
) -> Any:
    """Runs an op on its operands.

    The kernel of each platform is selected while the op is traced, and called where the program is
    lowered for that platform. Elsewhere, and where no kernel supports the call, the reference runs.
    A program can be lowered for a platform that this process has not.

    Args:
        op: the name of the op.
        reference: the same in JAX, a function of the operands.
        operands: arrays, as the FFI signature has them.
        results: what comes back: a ``jax.ShapeDtypeStruct``, or a tuple of them.
        asked: the operands that kernels are asked about, where these say more than those that they
            are called with.
        partition: makes a partitionable function of the operands out of the kernel, which is
            called as ``kernel(results, attributes, *operands)``.
        question: the parameters that kernels are asked about, where these aren't the attributes.
        attributes: of the FFI call: ints, floats, bools, strings and NumPy scalars.
    """
    branches: dict[str, Callable[..., Any]] = {}
    for platform in kernel_platforms():
        # First, since kernels for GPUs ask these what they are.
        runs_here = has_backend(platform)
        params = attributes if question is None else question
        choice = select_kernel(op, platform, operands if asked is None else asked, **params)
        if choice.spec is None:
            continue
        if runs_here:
            register_kernel(choice.spec)
        kernel = functools.partial(_ffi, choice.spec)
        branches[platform] = (
            functools.partial(kernel, results, attributes)
            if partition is None
            else partition(kernel)
        )
    if not branches:
        return reference(*operands)
    # In shard_map, branches must agree on the mesh axes that a result varies over.
    axes = frozenset().union(*(_axes(operand) for operand in operands))
    cast = functools.partial(functools.partial, _varying, axes)
    branches = {platform: cast(branch) for platform, branch in branches.items()}
    return lax.platform_dependent(*operands, default=cast(reference), **branches)


@functools.cache
def has_backend(platform: str) -> bool:
    """Whether this process can run on a platform: ``JAX_PLATFORMS`` may leave the CPU out."""
    try:
        return bool(jax.devices(platform))
    except RuntimeError:
        return False


def _varying(axes: frozenset[str], fn: Callable[..., Any], *operands: jax.Array) -> Any:
    """Calls a function; its results vary over `axes`."""

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(axes - _axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, fn(*operands))


def alike(*operands: jax.Array) -> tuple[jax.Array, ...]:
    """The operands, all varying over those mesh axes of a shard_map that any of them varies over.

    Where a function with a gradient of its own gets these, the gradient of an operand that was the
    same on all devices is summed over them.
    """
    axes = frozenset().union(*(_axes(operand) for operand in operands))
    return _varying(axes, lambda *given: given, *operands)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Empty:
    """Stands for an array without elements, that varies over some mesh axes of a shard_map."""

    shape: tuple[int, ...]
    dtype: Any
    axes: frozenset[str]


def without_empty(tree: Any) -> Any:
    """Returns a pytree of arrays without those that have no elements; see ``with_empty``.

    For what a ``custom_vjp`` keeps: such an array must not leave the body of a shard_map, since
    XLA of jaxlib 0.11.2 crashes on it.
    """
    return jax.tree.map(lambda x: x if x.size else _Empty(x.shape, x.dtype, _axes(x)), tree)


def with_empty(tree: Any) -> Any:
    """Returns the pytree that ``without_empty`` was given."""

    def one(x: Any) -> Any:
        if not isinstance(x, _Empty):
            return x
        return _varying(x.axes, lambda: jnp.zeros(x.shape, x.dtype))

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, _Empty))


def _axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes of a surrounding shard_map that an array varies over."""
    return jax.typeof(x).manual_axis_type.varying  # pyrefly: ignore[missing-attribute]


def _ffi(
    spec: KernelSpec,
    results: Any,
    attributes: dict[str, Any],
    *operands: jax.Array,
) -> Any:
    # What vmap does is decided a level above, in `batched`.
    wanted, treedef = jax.tree.flatten(results)
    size = kernel_workspace(spec, operands, wanted, **attributes)
    if size is None:
        return jax.ffi.ffi_call(spec.target, results)(*operands, **attributes)
    memory = jax.ShapeDtypeStruct((size,), jnp.uint8)
    *found, _ = jax.ffi.ffi_call(spec.target, (*wanted, memory))(*operands, **attributes)
    return jax.tree.unflatten(treedef, found)


def batched(
    fn: Callable[..., Any], rule: Callable[..., tuple[Any, Any]] | None = None
) -> Callable[..., Any]:
    """Gives a function of arrays a rule for ``vmap``.

    Args:
        fn: a function of arrays (pytrees of them).
        rule: called as ``rule(axis_size, in_batched, *args)``, as that of ``custom_vmap``;
            without one the function runs once per index.
    """
    wrapped = custom_vmap(fn)

    def one_by_one(axis_size: int, in_batched: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        leaves, treedef = jax.tree.flatten(args)
        flags = jax.tree.leaves(in_batched)
        mapped = [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]

        def body(given: list[Any]) -> Any:
            rest = iter(given)
            merged = [
                next(rest) if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)
            ]
            return wrapped(*jax.tree.unflatten(treedef, merged))

        out = lax.map(body, mapped)
        return out, jax.tree.map(lambda _: True, out)

    def batch(axis_size: int, in_batched: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        found = NotImplemented if rule is None else rule(axis_size, in_batched, *args)
        return one_by_one(axis_size, in_batched, *args) if found is NotImplemented else found

    wrapped.def_vmap(batch)
    return wrapped
