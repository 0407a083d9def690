"""The bridge of Equinox."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from provider_xla import Bridge, Quantized
from provider_xla.features import path_of

from .scopes import MARK, Subclasses, Tag, by_tag, is_ours, is_tagged

_TAG = "jaxtap_tag"


class EquinoxBridge(Bridge):
    """Bridge ``eqx.Module`` objects, whose parameters are all of their arrays."""

    def parameters(self, model: eqx.Module) -> Any:
        """Return the model, which is a pytree of its parameters."""
        return model

    def function(self, model: eqx.Module, method: str) -> Callable[..., Any]:
        """Return a method as a function of the model."""

        return _Run(method)

    def rebuild(self, model: eqx.Module, parameters: Any, quantized: Quantized) -> eqx.Module:
        """Return a model of the same structure."""
        return _tagged(parameters, quantized)

    def quantized(self, model: eqx.Module) -> Quantized | None:
        """Return how a model is quantized."""
        return _tag_of(model).quantized if is_ours(type(model)) else None

    def restore(self, model: eqx.Module, parameters: Any) -> eqx.Module:
        """Return a model of the classes that it had."""
        return _mapped(parameters, lambda module, path: _original(module))


@dataclasses.dataclass(frozen=True)
class _Run:
    """A method as a function of the model. It can be pickled.

    Attributes:
        method: its name.
    """

    method: str

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(_tagged(model, None), self.method)(*args, **kwargs)


def _original(module: eqx.Module) -> Any:
    """Return a copy of a module, of its original class."""
    cls = type(module)
    if not is_ours(cls):
        return module
    copy = object.__new__(vars(cls)[MARK])
    for name, value in vars(module).items():
        if name != _TAG:
            object.__setattr__(copy, name, value)
    return copy


def _tag_of(module: eqx.Module) -> Tag:
    return vars(module)[_TAG]


def _is_module(node: Any) -> bool:
    return isinstance(node, eqx.Module)


def _mapped(
    tree: Any, change: Callable[[eqx.Module, str], eqx.Module], path: str = "", top: bool = True
) -> Any:
    """Return a tree with every module changed, inner ones first; not ``top``: its own parts."""
    if top and not _is_module(tree):
        found, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_module)
    else:
        found, treedef = jax.tree_util.tree_flatten_with_path(
            tree, is_leaf=lambda node: node is not tree and _is_module(node)
        )
    leaves = [
        _mapped(leaf, change, _join(path, path_of(keys))) if _is_module(leaf) else leaf
        for keys, leaf in found
    ]
    changed = jax.tree.unflatten(treedef, leaves)
    return change(changed, path) if _is_module(tree) else changed


def _join(*paths: str) -> str:
    return "/".join(filter(None, paths))


def _with_tag(module: eqx.Module, tag: Tag) -> Any:
    """Return a tagged copy of a module, of a subclass of its class."""
    cls = _subclasses.of(type(module))
    if not is_ours(cls):
        return module
    copy = object.__new__(cls)
    for name, value in vars(module).items():
        object.__setattr__(copy, name, value)
    object.__setattr__(copy, _TAG, tag)
    return copy


def _tagged(tree: Any, quantized: Quantized | None, path: str = "") -> Any:
    """Return a tree with its modules tagged, by their place in it."""
    return _mapped(tree, lambda module, path: _with_tag(module, Tag(quantized, path)), path)


def _handed_out(tree: Any, quantized: Quantized | None, path: str) -> Any:
    """Return a method's result, with the modules in it tagged.

    They are tagged by their places in that module: a layer that the method has picked, say, or
    the module itself with other parameters.
    """

    def change(module: eqx.Module, _: str) -> Any:
        if not is_ours(type(module)):
            return module
        whole = _join(path, _tag_of(module).path)
        return _with_tag(module, Tag(quantized, whole))

    if any(map(_is_module, jax.tree.leaves(tree, is_leaf=_is_module))):
        return _mapped(tree, change)
    return tree


def _scoped(path: str, run: Callable[..., Any], self: Any, args: tuple, kwargs: dict) -> Any:
    """Run a method under its module's name scope."""
    with jax.named_scope(path):
        result = run(_tagged(self, None), *args, **kwargs)
    return _handed_out(result, None, path)


def _quantized(tag: Tag, name: str, self: Any, args: tuple, kwargs: dict) -> Any:
    """Run a method of a model, or of a submodule, quantized."""

    def fn(model: Any, *args: Any, **kwargs: Any) -> Any:
        inner = _tagged(model, None)
        if not tag.path:
            return _handed_out(getattr(inner, name)(*args, **kwargs), tag.quantized, "")
        inner = _with_tag(inner, Tag(None, tag.path))
        return _handed_out(getattr(inner, name)(*args, **kwargs), tag.quantized, "")

    assert tag.quantized is not None
    return tag.quantized.apply(fn)(self, *args, **kwargs)


_UNCHANGED = (eqx.nn.StateIndex, eqx.nn.Shared)
"""Keys of ``eqx.nn.State``, and a module that only returns its parts."""


def _namespace() -> dict[str, Any]:
    return {
        "__annotations__": {_TAG: Tag},
        _TAG: eqx.field(static=True, default=Tag(None, ""), repr=False, kw_only=True),
    }


def _plain(cls: type, method: Any) -> Any:
    """Return the function of a method that is wrapped.

    Equinox's own layers run without the name scope of their kind: ``head/eqx.nn.Linear`` is
    ``head`` to rules, as in other frameworks. Norms keep theirs: they hold no contractions, and
    what fuses them taps the method as it is.
    """
    own = cls.__module__.startswith("equinox.") and not issubclass(cls, _NORMS)
    return getattr(method, "__wrapped__", method) if own and inspect.isfunction(method) else method


def _new(cls: type) -> Any:
    # Not the class's __new__, after which Equinox waits for __init__.
    return object.__new__(_subclasses.of(cls))


_NORMS = (eqx.nn.LayerNorm, eqx.nn.RMSNorm)
_subclasses = Subclasses(
    by_tag(_tag_of, _scoped, _quantized),
    eqx.Module,
    unchanged=_UNCHANGED,
    namespace=_namespace,
    unwrap=_plain,
    new=_new,
    is_wrapped=is_tagged(_TAG),
)
