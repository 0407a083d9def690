"""The bridge of Flax NNX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from provider_xla import AdaptedWeight, Bridge, Quantized
from provider_xla.features import is_adapted, is_kept, is_stored, path_of

from .scopes import MARK, Subclasses, Tag, by_tag, is_ours, is_tagged

_TAG = "jaxtap_tag"
_CONTEXT = "jaxtap"
_FORM = "jaxtap_form"


class NnxBridge(Bridge):
    """Bridge ``nnx.Module`` objects, whose parameters are ``nnx.Param`` variables.

    Parameters are a nested dictionary by attribute, as ``nnx.to_pure_dict`` has it. Adapters are
    ``nnx.LoRAParam`` variables beside them: ``kernel_lora_a`` and ``kernel_lora_b``.
    """

    def parameters(self, model: nnx.Module) -> Any:
        """Return the values of the model's ``nnx.Param``."""
        params, adapters = nnx.state(model, _is_base, _is_adapter)
        return _joined(nnx.to_pure_dict(params), adapters)

    def function(self, model: nnx.Module, method: str) -> Callable[..., Any]:
        """Return a method that changes a copy of the model only."""

        return _Run(*_parts(model), method)

    def caches(self, model: nnx.Module) -> Any:
        """Return the values of the model's ``nnx.Cache``."""
        return _caches(model)

    def step(self, model: nnx.Module, method: str) -> Callable[..., Any]:
        """Return a method of a model copy, and the caches after it."""

        return _Step(*_parts(model), method)

    def with_caches(self, model: nnx.Module, caches: Any) -> nnx.Module:
        """Return the model, whose Variables hold other caches."""
        _set_caches(model, caches)
        return model

    def rest(self, model: nnx.Module) -> Any:
        """Return the values of the other variables, but for caches and intermediates."""
        return nnx.to_pure_dict(_rest(model)) or None

    def with_rest(self, model: nnx.Module, rest: Any) -> nnx.Module:
        """Return the model with other such values."""
        nnx.update(model, _replaced(_rest(model), rest))
        return model

    def rebuild(self, model: nnx.Module, parameters: Any, quantized: Quantized) -> nnx.Module:
        """Return a copy of the model with new Variables for the parameters."""
        bases = jax.tree.map(lambda x: x.base if is_adapted(x) else x, parameters, is_leaf=is_kept)
        copy = _copy(model, bases)
        _add_adapters(copy, parameters)
        _tag(copy, quantized)
        return copy

    def restore(self, model: nnx.Module, parameters: Any) -> nnx.Module:
        """Return a copy of the original classes, without adapters."""
        copy = nnx.clone(model)
        for _, module in nnx.iter_modules(copy):
            for name, value in [*vars(module).items()]:
                if isinstance(value, nnx.Variable) and _is_adapter((), value):
                    delattr(module, name)
            if is_ours(type(module)):
                delattr(module, _TAG)
                module.__class__ = vars(type(module))[MARK]
        nnx.update(copy, _replaced(nnx.state(copy, _is_base), parameters))
        return copy

    def quantized(self, model: nnx.Module) -> Quantized | None:
        """Return how a model is quantized."""
        return _tag_of(model).quantized if is_ours(type(model)) else None


def _rest(model: nnx.Module) -> nnx.State:
    passing = nnx.Any(nnx.Cache, nnx.Intermediate)
    *_, rest = nnx.state(model, nnx.Any(_is_base, _is_adapter), passing, ...)
    return rest


def _add_adapters(model: nnx.Module, parameters: Any) -> None:
    """Put the adapters of parameters into a model, beside the parameters."""
    nodes = dict(nnx.iter_graph(model))
    modules = {where: node for where, node in nodes.items() if _is_plain_module(node)}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(parameters, is_leaf=is_kept):
        if not is_adapted(leaf):
            continue
        path = tuple(key.key for key in keys)
        # A list of parameters takes no other attributes, so the module that holds it gets them.
        depth = max(i for i in range(len(path)) if path[:i] in modules)
        places = [(nodes[path[:depth]], _stem(path[depth:]))]
        # A parameter that several modules share is trained for all of them.
        places += [
            (module, name)
            for module in modules.values()
            for name, value in vars(module).items()
            if value is nodes[path] and (module, name) != places[0]
        ]
        own = nodes[path].get_metadata()
        for name, value in leaf.arrays.items():
            given = {_FORM: leaf.form} | _sharding_of(own, leaf.form.named_axes, name)
            variable = nnx.LoRAParam(value, **given)
            for module, stem in places:
                setattr(module, f"{stem}_{leaf.form.kind}_{name}", variable)


def _sharding_of(
    own: Mapping[str, Any], named: Callable[[str, Any], Any], name: str
) -> dict[str, Any]:
    """Return the sharding metadata of an adapter's array, from those of its parameter."""
    names = named(name, own.get("out_sharding"))
    if names is None:
        return {}
    kept = {key: own[key] for key in ("mesh", "sharding_rules") if own.get(key) is not None}
    # NNX would place it here and now, for which the mesh must be that of the context.
    return kept | {"out_sharding": names, "eager_sharding": False}


def _is_plain_module(node: Any) -> bool:
    """Return whether a node takes attributes of any name."""
    return isinstance(node, nnx.Module) and not isinstance(node, nnx.List | nnx.Dict)


def _joined(parameters: Any, adapters: nnx.State) -> Any:
    """Change ``parameters`` to have an AdaptedWeight for each that has an adapter; return them."""
    flat = nnx.to_flat_state(adapters)
    if not flat:
        return parameters
    # An adapter lies in a module of its parameter's path, under the rest of that path.
    found = jax.tree_util.tree_leaves_with_path(parameters, is_leaf=is_kept)
    paths = [tuple(key.key for key in keys) for keys, _ in found]
    bases = {(path[:i], _stem(path[i:])): path for path in paths for i in range(len(path))}
    arrays: dict[tuple, tuple[Any, dict[str, Any]]] = {}
    for (*owner, attribute), variable in flat:
        form = variable.get_metadata()[_FORM]
        stem, _, name = str(attribute).rpartition(f"_{form.kind}_")
        path = bases.get((tuple(owner), stem))
        if path is not None:
            arrays.setdefault(path, (form, {}))[1][name] = _value(variable)
    for path, (form, named) in arrays.items():
        held = parameters
        for key in path[:-1]:
            held = held[key]
        # A state has variables in the order of their names.
        ordered = {name: named[name] for name in form.shapes}
        held[path[-1]] = AdaptedWeight(held[path[-1]], ordered, form)
    return parameters


def _stem(path: tuple) -> str:
    return "_".join(map(str, path))


def _copy(model: nnx.Module, parameters: Any) -> Any:
    """Return a model of our classes with new parameters; share the rest."""
    graph, params, rest = nnx.split(model, _is_base, ...)
    return _built(graph, params, rest, parameters)


def _parts(model: nnx.Module) -> tuple[Any, nnx.State, nnx.State]:
    """Return a model's structure, the types of its parameters, and the rest with values."""
    graph, params, rest = nnx.split(model, _is_base, ...)
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    return graph, types, jax.tree.map(_settled, rest)


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
    """A method of a model as a function of its parameters. It can be pickled.

    Attributes:
        graph: the model's structure.
        params: the types of its parameters.
        rest: its other variables.
        method: the name of the method.
    """

    graph: Any
    params: nnx.State
    rest: nnx.State
    method: str

    def __call__(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        copy = _built(self.graph, self.params, jax.tree.map(_concrete, self.rest), parameters)
        _tag(copy, None)
        return getattr(copy, self.method)(*args, **kwargs)


class _Step(_Run):
    """A method as a function of parameters and caches, which returns the caches, too."""

    def __call__(self, parameters: Any, caches: Any, *args: Any, **kwargs: Any) -> Any:
        copy = _built(self.graph, self.params, jax.tree.map(_concrete, self.rest), parameters)
        _tag(copy, None)
        _set_caches(copy, caches)
        return getattr(copy, self.method)(*args, **kwargs), _caches(copy)


def _caches(model: nnx.Module) -> Any:
    return nnx.to_pure_dict(nnx.state(model, nnx.Cache)) or None


def _set_caches(model: nnx.Module, caches: Any) -> None:
    nnx.update(model, _replaced(nnx.state(model, nnx.Cache), caches))


def _built(graph: Any, params: nnx.State, rest: nnx.State, parameters: Any) -> Any:
    """Return a new model of our classes."""
    copy = nnx.merge(graph, _replaced(params, parameters), rest, copy=True)
    for _, module in nnx.iter_modules(copy):
        if not is_ours(type(module)):
            module.__class__ = _subclasses.of(type(module))
            setattr(module, _TAG, Tag(None, ""))
    return copy


def _settled(leaf: Any) -> Any:
    """Return a leaf that outlives the trace that a model is quantized in."""
    if isinstance(leaf, jax.core.Tracer):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def _concrete(leaf: Any) -> Any:
    """Return placeholder values for an abstract model's state: only types count."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), leaf.shape)
    return jnp.zeros(leaf.shape, leaf.dtype)


def _replaced(state: nnx.State, values: Any) -> nnx.State:
    """Return a state with the values of a nested dictionary."""
    state = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(state, values)
    return state


def _tag_of(module: nnx.Module) -> Tag:
    return vars(module)[_TAG]


def _tag(model: nnx.Module, quantized: Quantized | None, path: str = "") -> list[tuple[Any, Tag]]:
    """Tag a model and its submodules; return the tags they had."""
    before = []
    for below, module in nnx.iter_modules(model):
        if is_ours(type(module)):
            before.append((module, _tag_of(module)))
            whole = "/".join(filter(None, (path, path_of(below))))
            _set_tag(module, Tag(quantized, whole))
    return before


def _set_tag(module: nnx.Module, tag: Tag) -> None:
    # Not setattr: NNX refuses to change a module in a trace that it wasn't made in.
    object.__setattr__(module, _TAG, tag)


def _scoped(path: str, run: Callable[..., Any], self: Any, args: tuple, kwargs: dict) -> Any:
    """Run a method under its module's name scope."""
    before = _tag(self, None)
    try:
        with jax.named_scope(path):
            return run(self, *args, **kwargs)
    finally:
        for module, tag in before:
            _set_tag(module, tag)


def _quantized(tag: Tag, name: str, self: Any, args: tuple, kwargs: dict) -> Any:
    """Run a method of a model, or of a submodule, quantized.

    It runs on a copy that is a function of the parameters, of the other state, and of NNX objects
    among the arguments (``rngs=``). Then its changes are made in the originals, as by ``nnx.jit``,
    except for parameters that are stored.
    """
    quantized, path = tag.quantized, tag.path
    assert quantized is not None
    keyed = quantized.key_of(kwargs)
    flat, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_given)
    nodes = tuple(leaf for leaf in flat if _is_node(leaf))
    others = [None if _is_node(leaf) else leaf for leaf in flat]
    new_graph: Any = None

    def fn(parameters: Any, rest: Any, others: list[Any]) -> Any:
        nonlocal new_graph
        params = _replaced(theirs, {0: parameters})
        with nnx.merge_context(_CONTEXT, inner=True) as context:
            model, copies = both = context.merge(graph, params, rest)
        before, structure = _values(nnx.state(both)), nnx.graphdef(both)
        _tag(model, None, path)
        supply = iter(copies)
        filled = [next(supply) if _is_node(x) else y for x, y in zip(flat, others, strict=True)]
        args, kwargs = jax.tree.unflatten(treedef, filled)
        result = getattr(model, name)(*args, **kwargs)
        _tag(model, quantized, path)
        after = nnx.to_flat_state(nnx.state(both))
        # JAX passes on unchanged what a nested function does not change.
        changed = {
            where: variable
            for where, variable in after
            if where not in stored and not (where in before and before[where] is _value(variable))
        }
        new_graph = None
        if nnx.graphdef(both) != structure:
            with nnx.split_context(_CONTEXT) as context:
                new_graph, _ = context.split(both)
            new_graph = new_graph, [where for where, _ in after if where not in changed]
        return result, changed

    with nnx.update_context(_CONTEXT):
        with nnx.split_context(_CONTEXT) as context:
            graph, theirs, rest = context.split((self, nodes), _is_parameter, ...)
        originals = dict(nnx.to_flat_state(theirs)) | dict(nnx.to_flat_state(rest))
        values = {where: _value(variable) for where, variable in originals.items()}
        stored = {where for where, x in values.items() if is_stored(x) and not x.is_carried}
        held: Any = nnx.to_pure_dict(theirs)
        if quantized.has_adapters:
            held = _joined(held, nnx.filter_state(rest, _is_own_adapter))
        parameters = held.get(0, {})
        run = quantized.apply(fn)
        result, changed = run(parameters, rest, others, **keyed)
        if new_graph is not None:
            new_graph, kept = new_graph
            # If the model may not be changed, this raises before anything is.
            setattr(self, _TAG, tag)
            state = changed | {where: originals[where] for where in kept}
            with nnx.merge_context(_CONTEXT, inner=False) as context:
                context.merge(new_graph, nnx.from_flat_state(state))
        elif changed:
            nnx.update((self, nodes), nnx.from_flat_state(changed))
    return result


def _is_adapter(path: tuple, value: Any) -> bool:
    """Select the factors of adapters."""
    return isinstance(value, nnx.LoRAParam) and _FORM in value.get_metadata()


def _is_base(path: tuple, value: Any) -> bool:
    """Select the parameters, without adapters."""
    return _ANY_PARAM(path, value) and not _is_adapter(path, value)


def _is_parameter(path: tuple, value: Any) -> bool:
    """Select the parameters of the model, the first that is split."""
    return bool(path) and path[0] == 0 and _is_base(path, value)


def _is_own_adapter(path: tuple, value: Any) -> bool:
    return bool(path) and path[0] == 0 and _is_adapter(path, value)


_ANY_PARAM = nnx.filterlib.to_predicate(nnx.Param)


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Pytree | nnx.Variable)


def _is_given(leaf: Any) -> bool:
    """Return whether a node of arguments reaches a method unchanged."""
    return _is_node(leaf) or getattr(leaf, "is_carried", False)


def _value(variable: Any) -> Any:
    return variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable


def _values(state: nnx.State) -> dict[tuple, Any]:
    return {where: _value(variable) for where, variable in nnx.to_flat_state(state)}


def _new(cls: type) -> Any:
    return object.__new__(_subclasses.of(cls))


_subclasses = Subclasses(
    by_tag(lambda self: vars(self).get(_TAG), _scoped, _quantized),
    nnx.Module,
    options=lambda cls: {"pytree": cls._pytree__is_pytree},
    new=_new,
    is_wrapped=is_tagged(_TAG),
)
