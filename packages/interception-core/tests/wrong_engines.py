"""Engines that are wrong on purpose, in the suite that must catch them.

Not collected with the other tests: test_conformance_bites.py runs this file.
"""

import contextvars
import functools
import sys

import jax
import jax.numpy as jnp
import pytest
from hypothesis import Phase, settings

from interception_core import Interceptor, PatchEngine
from interception_core.patch.targets import find_holder
from interception_core.testing import EngineConformance

# That a program fails is enough: which is the smallest, nobody asks.
settings.register_profile("first failure", phases=[Phase.generate])
settings.load_profile("first failure")


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


class Call:
    """As little as a handler needs."""

    def __init__(self, op_name, original, kwargs):
        self.op_name, self.op_id = op_name, f"{op_name}:0"
        self.module_path, self.level = "", "function"
        self.params, self.operands, self.within = kwargs, (), frozenset()
        self.proceed = original


class MonkeyPatching:
    """Replaces functions wherever a module has them, and forgets JAX's caches, and threads."""

    def wrap(self, fn, interceptor):
        def call(*args, **kwargs):
            undo = []
            for target, handler in interceptor.items():
                holder, name = find_holder(target)
                self._patch(getattr(holder, name), handler, name, undo)
            try:
                return fn(*args, **kwargs)
            except BaseException:
                self.on_error(undo)
                raise
            finally:
                for module, attribute, original in undo:
                    setattr(module, attribute, original)

        return call

    def on_error(self, undo):
        pass

    @staticmethod
    def _patch(original, handler, name, undo):
        def tap(*args, **kwargs):
            result = handler(Call(name, original, kwargs), *args, **kwargs)
            return original(*args, **kwargs) if result is NotImplemented else result

        for module in list(sys.modules.values()):
            if vars(module).get(name) is original:
                undo.append((module, name, original))
                setattr(module, name, tap)


class Leaking(MonkeyPatching):
    """Leaves its patches when something is raised."""

    def on_error(self, undo):
        undo.clear()


class Flat:
    """Lets no scope open within another."""

    _active = contextvars.ContextVar("active", default=False)

    def wrap(self, fn, interceptor):
        inside = PatchEngine().wrap(fn, interceptor)

        @functools.wraps(fn)
        def call(*args, **kwargs):
            if self._active.get():
                return fn(*args, **kwargs)
            token = self._active.set(True)
            try:
                return inside(*args, **kwargs)
            finally:
                self._active.reset(token)

        return call


class Rewriting:
    """Wraps with another interceptor than it was given."""

    def wrap(self, fn, interceptor):
        return PatchEngine().wrap(fn, self.rewrite(interceptor))


class OneKey(Rewriting):
    """Has one cache key for all interceptors."""

    def rewrite(self, interceptor):
        return Interceptor(dict(interceptor), key="the same for all")


class Pathless(Rewriting):
    """Has one cache key for all paths."""

    def rewrite(self, interceptor):
        return Interceptor(dict(interceptor), key=interceptor.key, path_key=lambda path: None)


class Rounding(Rewriting):
    """Changes the last bit of what is let run."""

    def rewrite(self, interceptor):
        def around(handler):
            def rounded(call, *args, **kwargs):
                result = handler(call, *args, **kwargs)
                if result is NotImplemented:
                    result = call.proceed(*args, **kwargs)
                    result = result + jnp.asarray(2**-20, result.dtype)
                return result

            return rounded

        handlers = {target: around(handler) for target, handler in interceptor.items()}
        return Interceptor(handlers, key=interceptor.key)


class TestMonkeyPatching(EngineConformance):
    engine = MonkeyPatching()


class TestLeaking(EngineConformance):
    engine = Leaking()


class TestFlat(EngineConformance):
    engine = Flat()


class TestOneKey(EngineConformance):
    engine = OneKey()


class TestPathless(EngineConformance):
    engine = Pathless()


class TestRounding(EngineConformance):
    engine = Rounding()
    examples = 44
