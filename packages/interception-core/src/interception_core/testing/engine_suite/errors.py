"""Errors: refusals, exceptions of programs, and nothing left behind.

That everything is as it was is asserted after every test: see ``Suite``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ... import Interceptor, TargetError, UnknownNameError
from . import targets
from .base import TARGETS, Suite, arrays, let, noting, same, times
from .handlers import COMPOSITE, STEP, eager_and_jitted
from .transformations import TRANSFORMATIONS


class Unusual(BaseException):
    """No Exception."""


ERRORS = (ValueError, KeyboardInterrupt, SystemExit, Unusual)

every_error = pytest.mark.parametrize("error", ERRORS)

PLACES = ("none", "jit", "scan", "cond", "vmap", "grad", "checkpoint")
"""The transformations in which a handler raises."""


def failing(error: type[BaseException]) -> Callable:
    """Return a handler, or a function, that raises."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


class ErrorSuite(Suite):
    """Refusals and exceptions."""

    def works(self) -> None:
        """Assert that targets are untapped, and can be tapped again."""
        x, w = arrays((2, 3), (3, 3))
        plain = jnp.dot(x, w)
        same(targets.step(x, w), plain)
        same(self.wrap(targets.step, {STEP: times(2)})(x, w), 2 * plain)
        same(targets.step(x, w), plain)

    @every_error
    @eager_and_jitted
    def test_an_exception_in_the_body(self, error: type[BaseException], outer: Callable) -> None:
        with pytest.raises(error):
            outer(self.wrap(failing(error), {STEP: times(2)}))(*arrays((2, 3), (3, 3)))
        self.works()

    @every_error
    @eager_and_jitted
    def test_an_exception_in_a_handler(self, error: type[BaseException], outer: Callable) -> None:
        handlers = {STEP: failing(error), "jax.numpy.dot": let}
        with pytest.raises(error):
            outer(self.wrap(targets.composite, handlers))(*arrays((2, 3), (3, 3)))
        self.works()

    @pytest.mark.parametrize("place", PLACES)
    @every_error
    def test_an_exception_in_a_handler_in(self, place: str, error: type[BaseException]) -> None:
        def body(x: Any, w: Any) -> Any:
            return TRANSFORMATIONS[place](lambda x, w: targets.layer.shifted(x), x, w)

        handlers = {f"{TARGETS}.Layer.shifted": failing(error)}
        with pytest.raises(error):
            self.wrap(body, handlers)(*arrays((2, 3), (3, 3)))
        self.works()

    def test_an_exception_of_the_program_s_functions(self) -> None:
        (x,) = arrays((2, 3))
        with pytest.raises(targets.Refused, match=r"\(2, 3\)"):
            self.wrap(targets.refuse, {f"{TARGETS}.refuse": let})(x)
        with pytest.raises(targets.Refused, match=r"\(2, 3\)"):
            self.wrap(targets.refuse, {STEP: let})(x)
        self.works()

    def test_an_exception_that_the_program_catches(self) -> None:
        """The scope continues, with the same paths."""
        seen: list[str] = []

        def body(x: Any, w: Any) -> Any:
            with jax.named_scope("tried"):
                try:
                    with jax.named_scope("deeper"):
                        targets.refuse(x)
                except targets.Refused:
                    pass
                return targets.step(x, w)

        x, w = arrays((2, 3), (3, 3))
        same(self.wrap(body, {STEP: noting(seen, lambda call: call.op_id)})(x, w), jnp.dot(x, w))
        assert seen[0] == "tried/step:0"

    def test_an_exception_in_nested_scopes(self) -> None:
        x, w = arrays((2, 3), (3, 3))
        fn = self.wrap(self.wrap(targets.composite, {STEP: let}), {STEP: failing(Unusual)})
        with pytest.raises(Unusual):
            fn(x, w)
        fn = self.wrap(self.wrap(targets.composite, {STEP: failing(Unusual)}), {COMPOSITE: let})
        with pytest.raises(Unusual):
            fn(x, w)
        self.works()

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            ("jax.numpy.dott", "Did you mean 'jax.numpy.dot'"),
            ("jax.nmpy.dot", "Did you mean 'jax.numpy'"),
            (f"{TARGETS}.Layer.shift", "Did you mean '.*Layer.shifted'"),
            ("interception_cor.dot", "Unknown target"),
        ],
    )
    def test_unknown_names_are_refused(self, target: str, message: str) -> None:
        """At the call at the latest."""
        with pytest.raises(UnknownNameError, match=message):
            self.wrap(targets.step, {STEP: times(2), target: let})(*arrays((2, 3), (3, 3)))
        self.works()

    @pytest.mark.parametrize("target", ["dot", f"{TARGETS}.number", "jax.numpy..dot"])
    def test_what_is_no_function_is_refused(self, target: str) -> None:
        with pytest.raises(TargetError):
            self.wrap(targets.step, {STEP: times(2), target: let})(*arrays((2, 3), (3, 3)))
        self.works()

    @pytest.mark.parametrize("names", [(STEP, f"{TARGETS}.alias"), ("jax.nn.silu", "jax.nn.swish")])
    def test_two_names_of_one_function_are_refused(self, names: tuple[str, str]) -> None:
        """Which handler should run is undecided."""
        with pytest.raises(TargetError):
            self.wrap(targets.step, dict.fromkeys(names, let))(*arrays((2, 3), (3, 3)))
        self.works()

    def test_wrong_types_are_refused_at_once(self) -> None:
        with pytest.raises(TargetError):
            self.engine.wrap(3, Interceptor({STEP: let}))  # pyrefly: ignore[bad-argument-type]
        with pytest.raises(TargetError):
            self.engine.wrap(targets.step, {STEP: let})  # pyrefly: ignore[bad-argument-type]

    def test_a_wrapped_function_keeps_its_name_and_signature(self) -> None:
        import inspect

        wrapped = self.wrap(targets.affine, {STEP: let})
        assert (wrapped.__name__, wrapped.__doc__) == ("affine", targets.affine.__doc__)
        assert inspect.signature(wrapped) == inspect.signature(targets.affine)
