"""Call a function with its arrays alone, as JAX's transformations need; leaves of parameters."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, ParamSpec, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

import quant_numerics as qn
from hijax_trace import Carrier
from interception_core import followed_spec, hides_frames

from ..errors import QuantizationError

P = ParamSpec("P")
R = TypeVar("R")


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array, or the type of one."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def as_jax(dtype: Any) -> Any:
    """Return the dtype that an array has where a program gets it.

    JAX has no 64 bits where x64 is off. NumPy makes them unless it is told otherwise.
    """
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


def by_path(params: Any, prefix: str, is_leaf: Any = None) -> tuple[dict[str, Any], Any]:
    """Return the leaves of parameters by their pytree paths, and the structure of the tree."""
    found, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_leaf)
    return {prefix + jax.tree_util.keystr(path): leaf for path, leaf in found}, treedef


def map_params(
    change: Callable[[str, Any], Any], params: Any, prefix: str, is_leaf: Any = None
) -> Any:
    """Return parameters with each leaf changed by a function of its path and itself."""
    found, treedef = by_path(params, prefix, is_leaf)
    return jax.tree.unflatten(treedef, [change(path, leaf) for path, leaf in found.items()])


def as_batch(batch: Any) -> tuple[Any, ...]:
    """Return one of the batches that a plan's methods take, as a tuple.

    Raises:
        QuantizationError: it is not a tuple or a list of arguments.
    """
    if isinstance(batch, tuple | list):
        return tuple(batch)
    what = f"{batch.dtype}{list(batch.shape)}" if is_array(batch) else type(batch).__name__
    raise QuantizationError(
        "batches must hold tuples of the function's arguments without the parameters, such as "
        f"[(x,)], got {what}. Put it into a tuple."
    )


def types_of(tree: Any) -> Any:
    """Return a tree with the types of its arrays; other leaves stay."""

    def one(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)

    return jax.tree.map(one, tree)


def followed(sharding: NamedSharding, shape: Sequence[int], part: Sequence[int]) -> NamedSharding:
    """Return the sharding of a part of what is stored for an array, such as its scales.

    It is cut along the axes of the array that it has, also in tiles. One more axis is that of bit
    planes, before the last. A part with other axes is whole on each device.
    """
    spec = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    if shape and len(part) == len(shape) + 1:
        spec, shape = (*spec[:-1], None, spec[-1]), (*shape[:-1], part[-2], shape[-1])
    if len(part) != len(shape):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return NamedSharding(sharding.mesh, followed_spec(sharding.mesh, spec, shape, part))


def rebuilt(treedef: Any, leaves: Sequence[Any]) -> Any:
    """Return the parameters' tree of types or of stored parameters.

    Raises:
        QuantizationError: a class of the tree takes no such leaves.
    """
    try:
        return jax.tree.unflatten(treedef, leaves)
    except Exception as error:
        kinds = sorted({type(leaf).__name__ for leaf in leaves if is_array(leaf)})
        raise QuantizationError(
            f"A class of the parameters must take any object with a shape and a dtype in its "
            f"tree_unflatten, as JAX asks of pytree classes; got {error!r} for {', '.join(kinds)}. "
            "Check its arrays by shape and dtype alone, or not there; or keep parameters in a dict."
        ) from error


def of_arrays(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[[Sequence[Any]], list[Any]], list[Any]]:
    """Return ``fn`` as a function of its arguments' arrays, and the arrays.

    A leaf that is not an array (a string, an activation function) stays what it is. The function
    returns the arrays of the result.
    """
    flat, treedef = jax.tree.flatten((list(args), dict(kwargs)))
    places = [i for i, leaf in enumerate(flat) if is_array(leaf)]
    rest = [None if is_array(leaf) else leaf for leaf in flat]

    def call(arrays: Sequence[Any]) -> list[Any]:
        merged = list(rest)
        for place, array in zip(places, arrays, strict=True):
            merged[place] = array
        args, kwargs = jax.tree.unflatten(treedef, merged)
        return [leaf for leaf in jax.tree.leaves(fn(*args, **kwargs)) if is_array(leaf)]

    return call, [flat[i] for i in places]


def parameters_of(fn: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters that have a position."""
    return [*_positions_of(fn)]


def _positions_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """Return them with their defaults, or ``inspect.Parameter.empty``."""
    try:
        found = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return {}
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {one.name: one.default for one in found if one.kind in kinds}


def by_position(run: Callable[..., Any], fn: Callable[P, R], argnum: int) -> Callable[P, R]:
    """Return ``run`` for calls of ``fn`` that give the arguments up to ``argnum`` by name, too.

    Parameters are known by the pytree path of their argument. By name they would have another
    path, and no rule would take them for parameters.

    Raises:
        QuantizationError: at a call that names arguments, and does not tell which are those.
    """
    parameters = _positions_of(fn)
    names = [*parameters][: argnum + 1]
    defaults = {n: parameters[n] for n in names if parameters[n] is not inspect.Parameter.empty}
    # As of `partial(fn, x=x)`, where all that follow `x` are given by name alone.
    has_no_position = len(names) <= argnum

    @hides_frames
    @functools.wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > argnum or not kwargs:
            return run(*args, **kwargs)
        if has_no_position:
            raise QuantizationError(
                f"The parameters must be argument {argnum} of the function by position, got "
                f"{len(args)} by position, and {', '.join(kwargs)} by name. Pass them by position; "
                "if the function has no such position (as a partial that gives an argument before "
                "them by name), wrap it in one that has: lambda params, x: fn(x=x, params=params)."
            )
        missing = names[len(args) :]
        if names[argnum] not in kwargs or not kwargs.keys() | defaults.keys() >= {*missing}:
            return run(*args, **kwargs)  # the function says itself what it lacks
        # Those before the parameters that the call leaves out have a position, too.
        given = [kwargs.pop(n) if n in kwargs else defaults[n] for n in missing]
        return run(*args, *given, **kwargs)

    return call


def takes_any(fn: Callable[..., Any], names: Set[str]) -> bool:
    """Return whether a function has parameters of any of these names."""
    try:
        return not names.isdisjoint(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return False


def prefix_of(argument: int | str) -> str:
    """Return what the pytree paths of an argument begin with."""
    return f"args[{argument}]" if isinstance(argument, int) else f"kwargs[{argument!r}]"


def is_stored(node: Any) -> bool:
    """Return whether a node is a stored parameter: a form, or a carrier of forms."""
    return _is_stored_type(type(node))


# Asked for each leaf: isinstance of abstract classes costs ten times as much.
@functools.lru_cache(maxsize=256)
def _is_stored_type(kind: type) -> bool:
    return issubclass(kind, qn.StoredForm | Carrier)


def map_forms(change: Callable[[str | None, Any], Any], leaf: Any) -> Any:
    """Return a leaf with each stored form in it changed.

    ``change`` takes a form after the key of the expression of its derived weight, None for the
    parameter itself.
    """
    if not isinstance(leaf, Carrier):
        return change(None, leaf) if qn.is_form(leaf) else leaf
    own = change(None, leaf.own) if qn.is_form(leaf.own) else leaf.own
    derived = {key: change(key, one) for key, one in leaf.derived.items()}
    return dataclasses.replace(leaf, own=own, derived=derived)


def own_form(leaf: Any) -> Any:
    """Return what is stored for a parameter itself, without derived weights."""
    return leaf.own if isinstance(leaf, Carrier) else leaf


def unpacked_leaf(leaf: Any, *, kernels: bool = False) -> Any:
    """Return a leaf with QArrays for quantized values in packed storage.

    With ``kernels`` a form that says how a kernel contracts it stays as it is.
    """

    def one(values: Any) -> Any:
        if not qn.is_form(values):  # an array, of a parameter with an adapter
            return values
        is_left = kernels and type(values).contract is not qn.StoredForm.contract
        return values if is_left else values.unpacked()

    return map_forms(lambda _, form: form.with_values(one), leaf)
