"""The bridge of Flax Linen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax
import jax
from flax import linen
from flax.core import DenyList, lift
from flax.core.scope import in_filter
from flax.linen import transforms

import quant_numerics as qn

from ..errors import QuantizationError
from ..kernels.packed import PrepackedWeight
from ..lora.weight import AdaptedWeight, is_adapted
from .bridge import Bridge, Quantized, holds_kept, is_kept, path_of
from .scopes import MARK, Subclasses, is_ours

_FIELD = "jaxtap_quantized"
_CACHE = "cache"


class LinenBridge(Bridge):
    """Bridge ``linen.Module`` objects, bound or not.

    An unbound module holds no parameters: only its methods are quantized, for ``apply`` with float
    or stored variables. A bound module (``net.bind(variables)``) holds variables, and all of their
    collections are parameters, as for ``provider.plan(net.apply, variables, ...)``.
    """

    def parameters(self, model: linen.Module) -> Any:
        """Return the variables of a bound module; None for an unbound one."""
        return None if model.scope is None else _joined(dict(model.variables))

    def function(self, model: linen.Module, method: str) -> Callable[..., Any]:
        """Return a method as a function of the variables, discarding its updates."""
        module, rngs = _original(model.unbind()[0]), _rngs(model)
        mutable = _scope(model).mutable

        def fn(variables: Any, *args: Any, **kwargs: Any) -> Any:
            result = module.apply(
                variables, *args, rngs=rngs, mutable=mutable, method=method, **kwargs
            )
            return result if mutable is False else result[0]

        return fn

    def caches(self, model: linen.Module) -> Any:
        """Return a bound module's collection ``"cache"``, if it is mutable."""
        if model.scope is None or not in_filter(_scope(model).mutable, _CACHE):
            return None
        return flax.core.unfreeze(dict(model.variables)).get(_CACHE)

    def step(self, model: linen.Module, method: str) -> Callable[..., Any]:
        """Return a method, and what it makes of the collection ``"cache"``."""
        module, rngs = _original(model.unbind()[0]), _rngs(model)
        mutable = _scope(model).mutable

        def fn(variables: Any, caches: Any, *args: Any, **kwargs: Any) -> Any:
            variables = {**variables, _CACHE: caches}
            result, changed = module.apply(
                variables, *args, rngs=rngs, mutable=mutable, method=method, **kwargs
            )
            return result, changed[_CACHE]

        return fn

    def with_caches(self, model: linen.Module, caches: Any) -> linen.Module:
        """Return the module, bound to variables with other caches."""
        module, variables = model.unbind()
        variables = {**variables, _CACHE: caches}
        return module.bind(variables, rngs=_rngs(model), mutable=_scope(model).mutable)

    def rebuild(self, model: linen.Module, parameters: Any, quantized: Quantized) -> linen.Module:
        """Return a module of the same fields, bound like the given one."""
        module = model if model.scope is None else model.unbind()[0]
        module = _recast(module, _subclasses(quantized.methods).of(_class_of(module)))
        object.__setattr__(module, _FIELD, quantized)
        if model.scope is None:
            return module
        return module.bind(_apart(parameters), rngs=_rngs(model), mutable=model.scope.mutable)

    def restore(self, model: linen.Module, parameters: Any) -> linen.Module:
        """Return a bound module of the class that it had."""
        module = _original(model.unbind()[0])
        return module.bind(parameters, rngs=_rngs(model), mutable=_scope(model).mutable)

    def quantized(self, model: linen.Module) -> Quantized | None:
        """Return how a module is quantized."""
        return getattr(model, _FIELD) if is_ours(type(model)) else None


def _apart(variables: Any) -> dict[str, Any]:
    """Return variables with adapters in separate collections, such as ``"lora"``."""
    found: dict[str, Any] = {}
    for name, group in variables.items():
        found[name] = jax.tree.map(lambda x: x.base if is_adapted(x) else x, group, is_leaf=is_kept)
        for path, leaf in flax.traverse_util.flatten_dict(group).items():
            if isinstance(leaf, AdaptedWeight):
                held = found.setdefault(_collection(name), {})
                for key in path[:-1]:
                    held = held.setdefault(key, {})
                held[path[-1]] = dataclasses.replace(leaf, base=None)
    return found


def _joined(variables: Any) -> dict[str, Any]:
    """Return variables with each adapter at its parameter: undo ``_apart``."""
    variables = flax.core.unfreeze(variables)
    for name in [*variables]:
        own = _collection(name)
        if own not in variables:
            continue
        flat: dict[Any, Any] = flax.traverse_util.flatten_dict(
            variables[name], keep_empty_nodes=True
        )
        for path, leaf in flax.traverse_util.flatten_dict(variables.pop(own)).items():
            if path in flat and isinstance(leaf, AdaptedWeight):
                flat[path] = dataclasses.replace(leaf, base=flat[path])
        variables[name] = flax.traverse_util.unflatten_dict(flat)
    return variables


def _collection(name: str) -> str:
    """Return the collection of the adapters of the parameters in a collection."""
    return "lora" if name == "params" else f"lora_{name}"


def _scope(model: linen.Module) -> Any:
    """Return the scope of a bound module."""
    return model.scope


def _rngs(model: linen.Module) -> dict[str, jax.Array]:
    return {name: rng.as_jax_rng() for name, rng in _scope(model).rngs.items()}


def _class_of(module: linen.Module) -> type:
    cls = type(module)
    return vars(cls)[MARK] if is_ours(cls) else cls


def _recast(module: linen.Module, cls: type) -> Any:
    """Return a copy of a module in another class with equal fields."""
    copy = module.clone()
    object.__setattr__(copy, "__class__", cls)
    return copy


def _original(module: linen.Module) -> Any:
    """Return an unbound module in the class it had before quantization."""
    return _recast(module, _class_of(module)) if is_ours(type(module)) else module


def _wrap(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        quantized = getattr(self, _FIELD, None)
        if quantized is None or self.scope is None or self.is_initializing():
            return run(self, *args, **kwargs)
        return _lifted(quantized, name, self, args, kwargs)

    return method


def _lifted(quantized: Quantized, name: str, self: Any, args: tuple, kwargs: dict) -> Any:
    """Run a bound module's method quantized, as a lifted transformation.

    Variables, random keys and mutability are passed on as by other transformations, except that
    collections with stored parameters can't be written to.
    """

    def target(module: Any, *args: Any, **kwargs: Any) -> Any:
        object.__setattr__(module, "__class__", _class_of(module))
        return getattr(module, name)(*args, **kwargs)

    # The method opens its name scope itself.
    target.method_handler_wrapped = True  # pyrefly: ignore[missing-attribute]

    def transform(run: Callable[..., Any], scopes: Any, *args: Any, **kwargs: Any) -> Any:
        def inner(
            scope_fn: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any
        ) -> Any:
            (groups,) = variables
            single = len(groups) == 1
            keyed = quantized.key_of(kwargs)

            def fn(held: Any, rngs: Any, args: Any, kwargs: Any) -> Any:
                scope = scope_fn(((held,) if single else held,), rngs)
                return run(scope, *args, **kwargs), repack(scope)

            held = groups[0] if single else groups
            held = _joined(held) if single and quantized.has_adapters else held
            return quantized.apply(fn)(held, rngs, args, kwargs, **keyed)

        # Quantized caches are written to, unlike other quantized values.
        groups = self.variables.items()
        stored = tuple(name for name, group in groups if name != _CACHE and holds_kept(group))
        writable = DenyList(stored) if stored else True
        packed = lift.pack(inner, (True,), (writable,), (True,), "quantized", enable_kwargs=True)
        return packed(scopes, *args, **kwargs)

    return transforms.lift_direct_transform(transform, (target,), self, *args, **kwargs)


@linen.nowrap
def _apply(self: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a method, quantized; see ``linen.Module.apply``."""
    quantized = getattr(self, _FIELD, None)
    plain = _original(self)
    if quantized is None:
        return plain.apply(variables, *args, **kwargs)
    method = kwargs.get("method")
    if callable(method):
        kwargs["method"] = getattr(method, "__func__", method)
    if quantized.has_adapters:
        variables = _joined(variables)
    return quantized.apply(plain.apply)(variables, *args, **kwargs)


def _namespace() -> dict[str, Any]:
    return {"__annotations__": {_FIELD: Any}, _FIELD: None, "apply": _apply}


@functools.cache
def _subclasses(methods: tuple[str, ...]) -> Subclasses:
    # Wrap only these methods: each wrapped method opens a name scope.
    return Subclasses(_wrap, linen.Module, namespace=_namespace, only=methods)


def _to_state(value: Any) -> dict[str, Any]:
    """Return a stored parameter, or an adapter, as flax.serialization writes it."""
    found, _ = jax.tree_util.tree_flatten_with_path(value)
    return {
        "qtype": getattr(value, "qtype", "adapter"),
        **{path_of(keys): leaf for keys, leaf in found},
    }


def _from_state(target: Any, state: dict[str, Any]) -> Any:
    """Return the written parameter in the place of a similar one."""
    expected = _to_state(target)
    if expected.keys() != state.keys() or expected["qtype"] != state["qtype"]:
        raise QuantizationError(
            f"A parameter was saved as {state.get('qtype')} with {sorted(state)}, and is to be "
            f"loaded in the place of {expected['qtype']} with {sorted(expected)}. Load it into a "
            "model that is quantized by the same rules."
        )
    found, treedef = jax.tree_util.tree_flatten_with_path(target)
    return jax.tree.unflatten(treedef, [state[path_of(keys)] for keys, _ in found])


for _stored in (qn.QArray, qn.PackedQArray, PrepackedWeight, AdaptedWeight):
    flax.serialization.register_serialization_state(_stored, _to_state, _from_state, override=True)
