"""Op: an operation's kernel, reference, batching, sharding and gradient."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from interception_core import (
    CacheKey,
    KernelSpec,
    explicit_mesh,
    kernel_platforms,
    kernel_workspace,
    register_kernel,
    select_kernel,
    with_auto_axes,
)

from .batching import with_rule
from .partition import Partitioned

# Jitted functions are traced again when it changes.
_plain = CacheKey(False)


@contextlib.contextmanager
def reference_ops() -> Iterator[None]:
    """Run ops traced inside as plain JAX, with JAX's gradients."""
    with _plain(True):
        yield


class Op:
    """An operation on arrays, called as ``op(config, *operands)``.

    The config is hashable and holds what is known at compile time. Callers check arguments first.
    The kernel of each platform is selected while the op is traced, and called where the program is
    lowered for that platform, whether this process has it or not. Elsewhere, where no kernel
    supports the call, and inside ``reference_ops``, the reference runs.

    All functions that make up an op take the config and the operands, unless said otherwise.

    Args:
        name: the op that kernels are registered for, or a function of the config that returns it.
            With ``forward`` it is only the name in jaxprs.
        reference: returns the results in plain JAX.
        results: returns the ``jax.ShapeDtypeStruct`` of the result, or a tuple of them.
        attributes: returns the attributes of the FFI call, a dictionary of ints, floats, bools,
            strings and NumPy scalars.
        lowered: returns the operands of the FFI call, if they differ from those of the op.
        asked: returns the operands and parameters that kernels are asked about, if they differ from
            the operands and attributes of the FFI call.
        workspace: returns a ``jax.ShapeDtypeStruct``: the last result of the kernel, which the op
            drops.
        partition: called as ``partition(config, block, *operands)``; returns a partitionable
            function of the operands. ``block(config, *operands)`` calls the kernel on a device's
            block, for another config the kernel that supports it, or the reference. Without
            ``partition`` XLA gathers operands.
        batch: called as ``batch(run, config, size, in_batched, *operands)`` as a rule of
            ``custom_vmap``, with ``run(config, *operands)`` for the op; NotImplemented: one by one.
        forward: returns the result, computed by other ops instead of a kernel, and what the
            gradient needs.
        save: called as ``save(config, operands, result)``: what the gradient needs. By default the
            operands.
        gradient: called as ``gradient(config, saved, cotangent)``: cotangents of the operands, with
            None for zero. Without it an op has no gradient.
    """

    def __init__(
        self,
        name: str | Callable[[Any], str],
        reference: Callable[..., Any],
        *,
        results: Callable[..., Any] | None = None,
        attributes: Callable[..., dict[str, Any]] | None = None,
        lowered: Callable[..., tuple[jax.Array, ...]] | None = None,
        asked: Callable[..., tuple[Sequence[Any], dict[str, Any]]] | None = None,
        workspace: Callable[..., Any] | None = None,
        partition: Callable[..., Callable[..., Any]] | None = None,
        batch: Callable[..., Any] | None = None,
        forward: Callable[..., tuple[Any, Any]] | None = None,
        save: Callable[..., Any] | None = None,
        gradient: Callable[..., Any] | None = None,
    ) -> None:
        self._name, self._reference, self._results = name, reference, results
        self._attributes, self._lowered, self._asked = attributes, lowered, asked
        self._workspace, self._partition, self._batch = workspace, partition, batch
        run = self._batched if forward is None else lambda *args: forward(*args)[0]
        if gradient is not None:
            run = _differentiable(run, forward, save, gradient)

        def alike(config: Any, *operands: jax.Array) -> Any:
            return run(config, *_alike(*operands))

        def traced(config: Any, *operands: jax.Array) -> Any:
            mesh = explicit_mesh(operands)
            if mesh is None or forward is not None:  # made of ops, each of which does this
                return alike(config, *operands)
            specs = self._specs(config, *operands)
            return with_auto_axes(mesh, functools.partial(alike, config), specs, *operands)

        traced.__name__ = name if isinstance(name, str) else "op"
        # Jitted so that a model with many equal layers traces it once.
        self._jitted = jax.jit(traced, static_argnums=0)

    def __call__(self, config: Any, *operands: Any) -> Any:
        """Return the result."""
        if _plain.value:
            return self._reference(config, *map(jnp.asarray, operands))
        return self._jitted(config, *operands)

    def _batched(self, config: Any, *operands: jax.Array) -> Any:
        rule = None
        if self._batch is not None:
            rule = functools.partial(self._batch, self._batched, config)
        return with_rule(functools.partial(self._call, config), rule)(*operands)

    def _call(self, config: Any, *operands: jax.Array) -> Any:
        """Call a kernel, or the reference."""
        branches: dict[str, Callable[..., Any]] = {}
        for platform in kernel_platforms():
            # Asked first, because kernels for GPUs ask the devices what they support.
            runs_here = has_backend(platform)
            spec = self._select(platform, config, operands)
            if spec is None:
                continue
            if runs_here:
                register_kernel(spec)
            block = functools.partial(self._block_of, platform, spec, config)
            branches[platform] = (
                functools.partial(block, config)
                if self._partition is None
                else self._partition(config, block, *operands)
            )
        if not branches:
            return self._reference(config, *operands)
        # In shard_map, branches must agree on the mesh axes that a result varies over.
        cast = functools.partial(functools.partial, _varying, _all_axes(*operands))
        branches = {platform: cast(branch) for platform, branch in branches.items()}
        default = cast(functools.partial(self._in_jax, config))
        found = lax.platform_dependent(*operands, default=default, **branches)
        return found if self._workspace is None else found[:-1]

    def _specs(self, config: Any, *operands: jax.Array) -> Callable[[Any], Any]:
        """Return the results' shardings, where a kernel is partitioned."""
        rule = None
        if self._partition is not None:
            rule = self._partition(config, self._reference, *operands)
        found = None
        if isinstance(rule, Partitioned):
            found = rule.specs([jax.typeof(x) for x in operands])[1]

        def specs(results: Any) -> Any:
            leaves, tree = jax.tree.flatten(results)
            given = [()] * len(leaves) if found is None else found[: len(leaves)]
            return tree.unflatten(PartitionSpec(*spec) for spec in given)

        return specs

    def _in_jax(self, config: Any, *operands: jax.Array) -> Any:
        """Return the results as a kernel has them."""
        found = self._reference(config, *operands)
        if self._workspace is None:
            return found
        memory = self._workspace(config, *operands)
        return *found, jnp.zeros(memory.shape, memory.dtype)

    def _select(self, platform: str, config: Any, operands: tuple[jax.Array, ...]) -> Any:
        """Return the kernel for a call, or None."""
        name = self._name if isinstance(self._name, str) else self._name(config)
        if self._asked is not None:
            asked, params = self._asked(config, *operands)
        else:
            asked = jax.eval_shape(functools.partial(self._operands, config), *operands)
            params = self._attributes_of(config, operands)
        return select_kernel(name, platform, asked, **params).spec

    def _block_of(
        self, platform: str, spec: KernelSpec | None, of: Any, config: Any, *operands: jax.Array
    ) -> Any:
        """Call the kernel selected for config `of`, or select for another config."""
        spec = spec if config == of else self._select(platform, config, operands)
        run = self._in_jax if spec is None else functools.partial(self._block, spec)
        return run(config, *operands)

    def _block(self, spec: KernelSpec, config: Any, *operands: jax.Array) -> Any:
        """Call a kernel."""
        assert self._results is not None
        results = self._results(config, *operands)
        if self._workspace is not None:
            results = *results, self._workspace(config, *operands)
        attributes = self._attributes_of(config, operands)
        operands = self._operands(config, *operands)
        wanted, treedef = jax.tree.flatten(results)
        size = kernel_workspace(spec, operands, wanted, **attributes)
        if size is None:
            return jax.ffi.ffi_call(spec.target, results)(*operands, **attributes)
        memory = jax.ShapeDtypeStruct((size,), jnp.uint8)
        *found, _ = jax.ffi.ffi_call(spec.target, (*wanted, memory))(*operands, **attributes)
        return jax.tree.unflatten(treedef, found)

    def _operands(self, config: Any, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return operands if self._lowered is None else self._lowered(config, *operands)

    def _attributes_of(self, config: Any, operands: tuple[jax.Array, ...]) -> dict[str, Any]:
        return {} if self._attributes is None else self._attributes(config, *operands)


def gradient_of(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``gradient`` for an ``Op`` that saves its operands: JAX's, of a reference.

    Operands that aren't floats have none.
    """

    def gradient(config: Any, operands: Sequence[jax.Array], cotangent: Any) -> tuple[Any, ...]:
        floats = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)]

        def of_floats(*given: jax.Array) -> Any:
            filled = dict(zip(floats, given, strict=True))
            return reference(config, *(filled.get(i, x) for i, x in enumerate(operands)))

        grads = jax.vjp(of_floats, *(operands[i] for i in floats))[1](cotangent)
        found = dict(zip(floats, grads, strict=True))
        return tuple(found.get(i) for i in range(len(operands)))

    return gradient


@functools.cache
def has_backend(platform: str) -> bool:
    """Return whether this process has a platform (see ``JAX_PLATFORMS``).

    A platform that JAX can't start counts as missing.
    """
    try:
        return bool(jax.devices(platform))
    except RuntimeError:
        return False


def _differentiable(
    run: Callable[..., Any],
    forward: Callable[..., tuple[Any, Any]] | None,
    save: Callable[..., Any] | None,
    gradient: Callable[..., Any],
) -> Callable[..., Any]:
    """Return an op with its gradient."""
    op = jax.custom_vjp(run, nondiff_argnums=(0,))

    def with_saved(config: Any, *operands: jax.Array) -> tuple[Any, Any]:
        if forward is not None:
            found, saved = forward(config, *operands)
        else:
            found = op(config, *operands)  # itself, so that gradients have gradients
            saved = operands if save is None else save(config, operands, found)
        return found, _without_empty(saved)

    def backward(config: Any, saved: Any, cotangent: Any) -> Any:
        return gradient(config, _with_empty(saved), cotangent)

    op.defvjp(with_saved, backward)
    return op


def _alike(*operands: jax.Array) -> tuple[jax.Array, ...]:
    """Return operands varying over the same shard_map axes.

    The gradient of an operand that was equal on all devices is then summed over them, also if the
    gradient is a custom one.
    """
    return _varying(_all_axes(*operands), lambda *given: given, *operands)


def _varying(axes: frozenset[str], fn: Callable[..., Any], *operands: jax.Array) -> Any:
    """Call a function whose results vary over shard_map axes."""

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(axes - _axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, fn(*operands))


def varying_as(operands: Sequence[jax.Array], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return arrays that vary over all shard_map axes that operands vary over."""
    return _varying(_all_axes(*operands), lambda *given: given, *arrays)


def _axes(x: jax.Array) -> frozenset[str]:
    """Return the shard_map axes that an array varies over."""
    return jax.typeof(x).manual_axis_type.varying  # pyrefly: ignore[missing-attribute]


def _all_axes(*operands: jax.Array) -> frozenset[str]:
    return frozenset().union(*map(_axes, operands))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Empty:
    """An array without elements that varies over shard_map axes."""

    shape: tuple[int, ...]
    dtype: Any
    axes: frozenset[str]


def _without_empty(tree: Any) -> Any:
    """Return residuals without empty arrays; see ``_with_empty``.

    Such an array must not leave the body of a shard_map: XLA of jaxlib 0.11.2 crashes on it.
    """
    return jax.tree.map(lambda x: _Empty(x.shape, x.dtype, _axes(x)) if 0 in x.shape else x, tree)


def _with_empty(tree: Any) -> Any:
    """Return the pytree that ``_without_empty`` was given."""

    def one(x: Any) -> Any:
        if not isinstance(x, _Empty):
            return x
        return _varying(x.axes, lambda: jnp.zeros(x.shape, x.dtype))

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, _Empty))
