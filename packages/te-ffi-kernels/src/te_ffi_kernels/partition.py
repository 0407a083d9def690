"""How ops are partitioned: each device calls the kernel on its block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from interception_core import parts_of

Names = Sequence[Sequence[str]]
Spec = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """An op with a rule for partitioning.

    Attributes:
        run: the op, a function of its operands.
        specs: as in ``partitioned``.
    """

    run: Callable[..., Any]
    specs: Callable[[Any], tuple[Sequence[Spec], Sequence[Spec]]]

    def __call__(self, *operands: jax.Array) -> Any:
        """Return the results."""
        return self.run(*operands)


def partitioned(
    fn: Callable[..., Any],
    specs: Callable[[Any], tuple[Sequence[Spec], Sequence[Spec]]],
    axes_given: Names,
    axes_found: Names,
    whole: set[str],
    *,
    sizes: dict[str, int] | None = None,
    on_device: Callable[..., Callable[..., Any]] | None = None,
) -> Partitioned:
    """Return an op with a rule for partitioning.

    Args:
        fn: the op, a function of its operands.
        specs: returns the specs of operands and of results for the operands' types with shardings.
        axes_given: names of the operands' axes.
        axes_found: names of the results' axes; for one result the op returns it, else a tuple.
        whole: names of axes that each device has all of.
        sizes: sizes of the named parts of axes, such as of "c" in "(p c)".
        on_device: returns what runs on a device for the specs of operands and results; None for
            `fn`.
    """
    op = custom_partitioning(lambda *operands: fn(*operands))

    def shardings(mesh: Any, found: Sequence[Spec]) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in found)

    def results(mesh: Any, found: Sequence[Spec]) -> Any:
        out = shardings(mesh, found)
        return out[0] if len(axes_found) == 1 else out

    def infer(mesh: Any, arguments: Any, result: Any) -> Any:
        return results(mesh, specs(arguments)[1])

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        given, found = specs(arguments)
        run = fn if on_device is None else on_device(given, found)
        return mesh, _on_no_mesh(run), results(mesh, found), shardings(mesh, given)

    sides = [", ".join(" ".join(axes) for axes in side) for side in (axes_given, axes_found)]
    # In the order in which they appear, which Shardy wants.
    names = " ".join(sides).replace(",", " ").replace("(", " ").replace(")", " ").split()
    op.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=" -> ".join(sides),
        need_replication_factors=tuple(name for name in dict.fromkeys(names) if name in whole),
        **(sizes or {}),
    )
    return Partitioned(op, specs)


def _on_no_mesh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is traced for one device, whatever ``jax.set_mesh`` says.

    JAX traces it where the program is compiled. On explicit axes JAX 0.12 would put shardings into
    it, which a partitioned program can't have.
    """

    def run(*operands: jax.Array) -> Any:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return fn(*operands)

    return run


def partition_rows(
    fn: Callable[..., Any],
    axes_given: Names,
    axes_found: Names,
    whole: set[str],
    sums: Sequence[int] = (),
    *,
    alike: Mapping[str, str] | None = None,
    multiples: Mapping[str, int] | None = None,
    on_device: Callable[[Sequence[Spec]], Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Return an op that can be partitioned along all axes but some.

    Args:
        fn: the op, a function of its operands.
        axes_given: names of the operands' axes. Axes of one name are shared out alike.
        axes_found: names of the results' axes.
        whole: names of axes that each device has all of.
        sums: indices of the results that are sums over the axes that they don't have.
        alike: axis name -> name of an axis of another size that it is shared out like.
        multiples: axis name -> what a device's share of it must be a multiple of; by default 1.
        on_device: returns what runs on a device for the specs of operands; None for `fn`.
    """
    alike, multiples = alike or {}, multiples or {}
    keys_given, keys_found = (
        [[alike.get(name, name) for name in names] for names in side]
        for side in (axes_given, axes_found)
    )

    def specs(arguments: Any) -> tuple[list[Spec], list[Spec]]:
        found: dict[str, Any] = {}
        lengths: dict[str, set[int]] = {}
        for names, argument in zip(keys_given, arguments, strict=True):
            for name, length in zip(names, argument.shape, strict=True):
                lengths.setdefault(name, set()).add(length)
        for names, argument in zip(keys_given, arguments, strict=True):
            given = spec_of(argument, range(len(names)))
            for name, axes in zip(names, given, strict=True):
                if axes is None or name in whole or name in found:
                    continue
                parts = parts_of(argument.sharding.mesh, axes) * multiples.get(name, 1)
                fits = not any(length % parts for length in lengths[name])
                if fits and not axes_in((axes,)) & axes_in(tuple(found.values())):
                    found[name] = axes
        given, out = (
            [tuple(found.get(name) for name in names) for names in side]
            for side in (keys_given, keys_found)
        )
        return given, out

    def run(given: Sequence[Spec], found: Sequence[Spec]) -> Callable[..., Any]:
        block = fn if on_device is None else on_device(given)
        return _summed(block, sums, given, found)

    return partitioned(fn, specs, axes_given, axes_found, whole, on_device=run)


def _summed(
    fn: Callable[..., Any], sums: Sequence[int], given: Sequence[Spec], found: Sequence[Spec]
) -> Callable[..., Any]:
    """Sum a device's results over mesh axes that only operands share."""
    shared = axes_in(tuple(axes for spec in given for axes in spec))
    over = {i: tuple(sorted(shared - axes_in(found[i]))) for i in sums}
    if not any(over.values()):
        return fn

    def summed(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(
            jax.lax.psum(x, over[i]) if over.get(i) else x for i, x in enumerate(fn(*operands))
        )

    return summed


def spec_of(argument: Any, axes: Sequence[int]) -> Spec:
    """Return the mesh axes of some axes of an array."""
    spec = tuple(getattr(argument.sharding, "spec", ()))
    spec += (None,) * (len(argument.shape) - len(spec))
    return tuple(spec[i] for i in axes)


def axes_in(spec: Sequence[Any]) -> set[str]:
    """Return all mesh axes in a spec."""
    found: set[str] = set()
    for axes in spec:
        found |= set() if axes is None else {axes} if isinstance(axes, str) else set(axes)
    return found
