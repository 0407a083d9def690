"""Dataclasses whose ``__init__`` writes the fields at once."""

import copy
import dataclasses
import inspect

import jax
import jax.numpy as jnp
import pytest

from interception_core import quick_init


def a_class():
    @dataclasses.dataclass(frozen=True, eq=False)
    class Weight:
        values: jax.Array
        bits: int = dataclasses.field(metadata={"static": True})
        scale: float | None = None
        names: tuple = dataclasses.field(default=("a",), kw_only=True, metadata={"static": True})

        @property
        def size(self):
            return self.bits * self.values.size

    return Weight


def test_the_class_is_as_without():
    plain, quick = a_class(), quick_init(a_class())
    assert inspect.signature(quick) == inspect.signature(plain)
    for args, kwargs in (((1, 8), {}), ((1,), {"bits": 4, "names": ()}), ((1, 2, 0.5), {})):
        assert vars(quick(*args, **kwargs)) == vars(plain(*args, **kwargs))
        assert repr(quick(*args, **kwargs)) == repr(plain(*args, **kwargs))
    for args in ((), (1,), (1, 2, 3, 4)):
        with pytest.raises(TypeError, match=r"__init__\(\)"):
            quick(*args)
    with pytest.raises(dataclasses.FrozenInstanceError):
        quick(1, 8).bits = 4
    assert dataclasses.replace(quick(1, 8), bits=4).bits == 4
    assert copy.deepcopy(quick(1, 8)).names == ("a",)


def test_as_a_pytree():
    weight = jax.tree_util.register_dataclass(quick_init(a_class()))
    doubled = jax.jit(lambda w: jax.tree.map(lambda x: x * 2, w))(weight(jnp.arange(3), 8))
    assert (doubled.values == jnp.array([0, 2, 4])).all()
    assert (doubled.bits, doubled.scale, doubled.names, doubled.size) == (8, None, ("a",), 24)


def test_fields_of_any_name():
    @quick_init
    @dataclasses.dataclass(frozen=True)
    class Named:
        fields: int
        self: int
        defaults: int = 3
        cls: int = 4

    assert vars(Named(1, 2)) == {"fields": 1, "self": 2, "defaults": 3, "cls": 4}
    assert Named(fields=5, self=6, cls=7) == Named(5, 6, 3, 7)


@dataclasses.dataclass
class Checked:
    x: int

    def __post_init__(self):
        assert self.x


@dataclasses.dataclass(slots=True)
class Slots:
    x: int


@dataclasses.dataclass
class Made:
    x: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Empty(Slots):
    pass


@dataclasses.dataclass(init=False)
class OwnInit:
    x: int

    def __init__(self, x):
        self.x = x + 1


@dataclasses.dataclass
class Given:
    x: int
    scale: dataclasses.InitVar[int] = 1


@pytest.mark.parametrize("cls", [int, Checked, Slots, Made, Empty, OwnInit, Given])
def test_others_are_refused(cls):
    with pytest.raises(TypeError, match=f"quick_init's class must be a dataclass.*{cls.__name__}"):
        quick_init(cls)
