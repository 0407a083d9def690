"""Generated: random programs keep their bits under a tap."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ..programs import FORM_NAMES, Program, programs
from .base import Suite, let, same

TARGETS = (
    "jax.numpy.dot",
    "jax.numpy.matmul",
    "jax.numpy.einsum",
    "jax.lax.dot_general",
    "jax.nn.softmax",
    "jax.nn.gelu",
)
PRIMITIVES = ("primitive:dot_general", "primitive:exp")


class GeneratedSuite(Suite):
    """As many programs of each outermost form as make up ``examples``."""

    @pytest.mark.parametrize("form", FORM_NAMES)
    def test_generated_programs_keep_their_bits(self, form: str) -> None:
        """Value and gradient, with the tap around either."""
        handlers = dict.fromkeys(TARGETS + (PRIMITIVES if self.primitives else ()), let)

        # Within the test, as Hypothesis wants a separate test for each subclass.
        @settings(
            max_examples=-(-self.examples // len(FORM_NAMES)),
            derandomize=True,
            deadline=None,
            # Programs are small, and minutes go by while smaller ones are compiled and compared.
            phases=[Phase.generate],
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(program=programs(form), around=st.sampled_from(["loss", "gradient"]))
        def check(program: Program, around: str) -> None:
            if around == "loss":
                plain = jax.value_and_grad(self.plain(program))
                tapped = jax.value_and_grad(self.wrap(program, handlers))
            else:
                # With JIT off where the tap has it off: in the backward pass as well.
                plain = self.plain(jax.value_and_grad(program))
                tapped = self.wrap(jax.value_and_grad(program), handlers)
            compare(plain, tapped, program.args(), program.rows == 2)

        check()


def compare(plain: Any, tapped: Any, args: tuple, run: bool = False) -> None:
    """Assert that both give the same bits under jit.

    Most of the time goes to XLA. Programs of equal text are one program to it, and their results
    would only differ if XLA's did. So those that differ are compiled, with XLA's usual options,
    and run; those that don't only where ``run`` asks for it, which is for a quarter of them.
    """
    # One name for both: it is part of the text.
    ours, theirs = (jax.jit(lambda *args, fn=fn: fn(*args)).lower(*args) for fn in (plain, tapped))
    assert jax.tree.leaves(ours.out_info) == jax.tree.leaves(theirs.out_info)
    if run or ours.as_text() != theirs.as_text():
        same(theirs.compile()(*args), ours.compile()(*args))
