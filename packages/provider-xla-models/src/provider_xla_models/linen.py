"""The bridge of Flax Linen."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import flax
import jax
from flax import linen
from flax.core import DenyList, lift
from flax.core.scope import in_filter
from flax.errors import ScopeParamShapeError
from flax.linen import transforms
from jax.tree_util import DictKey

from hijax_trace import OutsideError
from interception_core import hides_frames
from provider_xla import Bridge, Quantized
from provider_xla.features import AdapterForm, holds_kept, is_adapted, is_kept, keeps_floats

from .scopes import MARK, NotNamedError, Subclasses, is_ours, methods_of, reduced

_FIELD = "jaxtap_quantized"
_PATH = "jaxtap_path"
"""The field of a part of a quantized module: the name scopes that it has in that; else None."""
_PARTS = "jaxtap_parts"
"""The attribute of a quantized module that holds its parts."""
_CACHE = "cache"


class LinenBridge(Bridge):
    """Bridge ``linen.Module`` objects, bound or not.

    An unbound module holds no parameters: only its methods are quantized, for ``apply`` with float
    or stored variables. Its ``init`` returns stored ones, as Qwix's does. A bound module
    (``net.bind(variables)``) holds variables, and all of their collections are parameters, as for
    ``provider.plan(net.apply, variables, ...)``.
    """

    def parameters(self, model: linen.Module) -> Any:
        """Return the variables of a bound module; None for an unbound one."""
        return None if model.scope is None else _joined(dict(model.variables))

    def function(self, model: linen.Module, method: str) -> Callable[..., Any]:
        """Return a method as a function of the variables, discarding its updates."""
        module = _original(model.unbind()[0])
        return _Run(module, _rngs(model), _scope(model).mutable, method)

    def caches(self, model: linen.Module) -> Any:
        """Return a bound module's collection ``"cache"``, if it is mutable."""
        if model.scope is None or not in_filter(_scope(model).mutable, _CACHE):
            return None
        return flax.core.unfreeze(dict(model.variables)).get(_CACHE)

    def step(self, model: linen.Module, method: str) -> Callable[..., Any]:
        """Return a method, and what it makes of the collection ``"cache"``."""
        module = _original(model.unbind()[0])
        return _Step(module, _rngs(model), _scope(model).mutable, method)

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


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
    """A method as a function of the variables. It can be pickled.

    Attributes:
        module: the module, not bound.
        rngs: its random keys.
        mutable: the collections that it may change.
        method: the name of the method.
    """

    module: linen.Module
    rngs: dict[str, jax.Array]
    mutable: Any
    method: str

    def __call__(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        options = {"rngs": self.rngs, "mutable": self.mutable, "method": self.method}
        result = self.module.apply(variables, *args, **options, **kwargs)
        return result if self.mutable is False else result[0]


class _Step(_Run):
    """A method as a function of variables and caches, which returns the caches, too."""

    def __call__(self, variables: Any, caches: Any, *args: Any, **kwargs: Any) -> Any:
        options = {"rngs": self.rngs, "mutable": self.mutable, "method": self.method}
        variables = {**variables, _CACHE: caches}
        result, changed = self.module.apply(variables, *args, **options, **kwargs)
        return result, changed[_CACHE]


def _apart(variables: Any) -> dict[str, Any]:
    """Return variables with adapters in separate collections, such as ``"lora"``."""
    found: dict[str, Any] = {}
    for name, group in variables.items():
        found[name] = jax.tree.map(lambda x: x.base if is_adapted(x) else x, group, is_leaf=is_kept)
        for keys, node in jax.tree_util.tree_leaves_with_path(group, is_leaf=_is_held):
            leaf = _unboxed(node)
            if is_adapted(leaf):
                kind = leaf.form.kind
                own = kind if name == "params" else f"{kind}_{name}"
                held = found.setdefault(own, {})
                *above, last = _names(keys)
                for key in above:
                    held = held.setdefault(key, {})
                arrays = {name: _boxed(node, leaf.form, name, x) for name, x in leaf.arrays.items()}
                held[last] = dataclasses.replace(leaf, base=None, arrays=arrays)
    return found


def _is_held(node: Any) -> bool:
    """Return whether a node is a parameter, or the box of one that has an adapter."""
    return is_kept(node) or is_adapted(_unboxed(node))


def _unboxed(node: Any) -> Any:
    return node.value if isinstance(node, linen.Partitioned) else node


def _boxed(node: Any, form: AdapterForm, name: str, array: Any) -> Any:
    """Return an adapter's array with the sharding metadata of its parameter, if that has some."""
    names = form.named_axes(name, getattr(node, "names", None))
    return array if names is None else node.replace(value=array, names=names)


def _names(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a variable's names in its collection, without the box that holds its metadata."""
    return tuple(key.key for key in keys if isinstance(key, DictKey))


def _joined(variables: Any) -> dict[str, Any]:
    """Return variables with each adapter at its parameter: undo ``_apart``."""
    variables = flax.core.unfreeze(variables)
    for own, group in [*variables.items()]:
        leaves = flax.traverse_util.flatten_dict(group)
        adapters: dict[Any, Any] = {
            names: leaf for names, leaf in leaves.items() if is_adapted(leaf)
        }
        kinds = {leaf.form.kind for leaf in adapters.values() if leaf.base is None}
        if not kinds:
            continue
        (kind,) = kinds
        name = "params" if own == kind else own.removeprefix(f"{kind}_")

        def one(keys: tuple[Any, ...], leaf: Any, adapters: dict = adapters) -> Any:
            adapter = adapters.get(_names(keys))
            if adapter is None:
                return leaf
            arrays = {name: _unboxed(x) for name, x in adapter.arrays.items()}
            return dataclasses.replace(adapter, base=leaf, arrays=arrays)

        del variables[own]
        variables[name] = jax.tree_util.tree_map_with_path(one, variables[name], is_leaf=is_kept)
    return variables


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


def _wrap(methods: Collection[str], name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    @hides_frames
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        quantized = getattr(self, _FIELD, None)
        if quantized is None or self.scope is None or self.is_initializing():
            return run(self, *args, **kwargs)
        if name in methods:
            return _lifted(quantized, name, self, args, kwargs)
        try:
            return run(self, *args, **kwargs)
        except (OutsideError, NotNamedError, ScopeParamShapeError) as error:
            if not any(map(holds_kept, self.variables.values())):
                raise
            raise NotNamedError.of(self, name, quantized) from error

    # Linen opens a name scope for each method that it wraps: that of the original is enough.
    return method if name in methods else linen.nowrap(method)


def _lifted(quantized: Quantized, name: str, self: Any, args: tuple, kwargs: dict) -> Any:
    """Run a bound module's method quantized, as a lifted transformation.

    Variables, random keys and mutability are passed on as by other transformations, except that
    collections with stored parameters can't be written to.
    """

    *above, _ = getattr(self, _PATH) or (None,)

    def target(module: Any, *args: Any, **kwargs: Any) -> Any:
        object.__setattr__(module, "__class__", _class_of(module))
        with contextlib.ExitStack() as scopes:
            for part in above:
                scopes.enter_context(jax.named_scope(part))
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
@hides_frames
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


@linen.nowrap
@hides_frames
def _init(self: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
    """Return new variables, stored as those of a bound module are; see ``linen.Module.init``."""
    quantized, plain = getattr(self, _FIELD, None), _original(self)
    variables = plain.init(rngs, *args, **kwargs)
    if quantized is None or keeps_floats(quantized.provider) or "params" not in variables:
        return variables
    rngs = rngs if isinstance(rngs, Mapping) else {"params": rngs}
    # What a method writes is of no interest to the plan, and may be as large as the parameters.
    run = functools.partial(plain.apply, rngs=dict(rngs), mutable=False)
    kwargs.pop("mutable", None)
    return quantized.provider.plan(run, variables, *args, **kwargs).quantize(variables)


@linen.nowrap
def _reduce(self: Any, protocol: Any) -> Any:
    """Return how a module is pickled: a bound one by its variables."""
    if self.scope is None:
        new = functools.partial(_new, getattr(self, _FIELD).methods)
        return reduced(_class_of(self), new)(self, protocol)
    module, variables = self.unbind()
    return _bound, (module, variables, _rngs(self), _scope(self).mutable)


def _bound(module: Any, variables: Any, rngs: Any, mutable: Any) -> Any:
    return module.bind(variables, rngs=rngs, mutable=mutable)


def _new(methods: tuple[str, ...], cls: type) -> Any:
    return object.__new__(_subclasses(methods).of(cls))


@linen.nowrap
def _attribute(self: Any, name: str) -> Any:
    """Return an attribute; modules in it as parts of a quantized module."""
    found: Any = _class_of(self).__getattribute__
    return _parts(self, name, found(self, name))


@linen.nowrap
def _attribute_of_setup(self: Any, name: str) -> Any:
    """Return an attribute that ``setup`` makes."""
    return _parts(self, name, _class_of(self).__getattr__(self, name))


def _parts(parent: Any, name: str, found: Any) -> Any:
    """Return what a quantized module holds, with its bound modules quantized, too.

    They are copies: what runs in the module itself are the modules that Linen knows.
    """
    if not isinstance(found, linen.Module | tuple | Mapping) or name in _LINENS:
        return found
    if getattr(parent, _FIELD) is None or parent.scope is None:
        return found
    known = vars(parent).setdefault(_PARTS, {})

    def part(value: Any) -> Any:
        if not isinstance(value, linen.Module) or value.scope is None or is_ours(type(value)):
            return value
        if id(value) not in known:
            known[id(value)] = value, _part(parent, value)
        return known[id(value)][1]

    def is_module(value: Any) -> bool:
        return isinstance(value, linen.Module)

    held = any(map(is_module, jax.tree.leaves(found, is_leaf=is_module)))
    return jax.tree.map(part, found, is_leaf=is_module) if held else found


_LINENS = frozenset(dir(linen.Module)) | {"parent", "scope", "__dict__"}
"""Attributes that are Linen's own."""


def _part(parent: Any, module: Any) -> Any:
    """Return a module of a quantized module, quantized in all of its methods."""
    cls, scope = type(module), _scope(module)
    methods = tuple(methods_of(cls, linen.Module))
    copy = module.clone(parent=scope, name=module.name)
    object.__setattr__(copy, "__class__", _subclasses(methods).of(cls))
    object.__setattr__(copy, _FIELD, dataclasses.replace(getattr(parent, _FIELD), methods=methods))
    above = getattr(parent, _PATH) or (parent.name or type(parent).__name__,)
    object.__setattr__(copy, _PATH, (*above, scope.name))
    return copy


def _namespace() -> dict[str, Any]:
    fields = {"__annotations__": {_FIELD: Any, _PATH: Any}, _FIELD: None, _PATH: None}
    return fields | {
        "apply": _apply,
        "init": _init,
        "__reduce_ex__": _reduce,
        "__getattribute__": _attribute,
        "__getattr__": _attribute_of_setup,
    }


@functools.cache
def _subclasses(methods: tuple[str, ...]) -> Subclasses:
    return Subclasses(
        functools.partial(_wrap, methods),
        linen.Module,
        namespace=_namespace,
        new=functools.partial(_new, methods),
        is_wrapped=None,
    )
