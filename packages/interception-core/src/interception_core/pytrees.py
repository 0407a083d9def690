"""Pytrees: dataclasses of arrays that cost little to build."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, TypeVar

T = TypeVar("T")


def quick_init(cls: type[T]) -> type[T]:
    """Let the ``__init__`` of a frozen dataclass write its fields without a call for each.

    JAX builds a node for each weight among the arguments of a jitted function, whenever it traces
    that. A model has hundreds, and a weight in a kernel's layout 24 fields: this takes a third.

    Args:
        cls: the dataclass, without ``__slots__``, ``__post_init__``, a written ``__init__``,
            ``InitVar`` and fields that ``__init__`` does not take or that a ``default_factory``
            makes.

    Returns:
        The class, so that this may be a decorator.

    Raises:
        TypeError: it is not such a class.
    """
    is_plain = dataclasses.is_dataclass(cls) and not hasattr(cls, "__post_init__")
    # A slot hides what `__dict__` has, and a written `__init__` may do more.
    is_plain = is_plain and not any(vars(base).get("__slots__") for base in cls.__mro__)
    is_plain = is_plain and cls.__dataclass_params__.init  # type: ignore[attr-defined]
    fields: tuple[Any, ...] = dataclasses.fields(cls) if is_plain else ()  # type: ignore[arg-type]
    # An `InitVar` is a parameter and no field.
    if (
        not fields
        or {field.name for field in fields} != {*inspect.signature(cls).parameters}
        or any(field.default_factory is not dataclasses.MISSING for field in fields)
    ):
        raise TypeError(
            "quick_init's class must be a dataclass whose fields are all given to the __init__ "
            "that dataclasses make, without InitVar, __slots__, __post_init__ and "
            f"default_factory, got {cls!r}. Leave the decorator out."
        )
    signature = inspect.signature(cls)
    # Written as text, as `dataclasses` does: the fields are parameters by name.
    defaults = {field.name: field.default for field in fields}
    parameters = [
        name if defaults[name] is dataclasses.MISSING else f"{name}=defaults[{name!r}]"
        for name in signature.parameters
    ]
    kinds = [one.kind for one in signature.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    # Fields may be called "self" or "fields".
    body = "".join(f"\n    __quick__[{name!r}] = {name}" for name in signature.parameters)
    text = f"def __init__(__quick__, {', '.join(parameters)}):\n    __quick__ = __quick__.__dict__"
    text += body
    made: dict[str, Any] = {}
    exec(text, {"defaults": defaults}, made)
    init, own = made["__init__"], cls.__init__
    init.__annotations__, init.__qualname__ = own.__annotations__, own.__qualname__
    cls.__init__ = init
    return cls
