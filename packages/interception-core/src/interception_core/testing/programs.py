"""Programs made at random: what JAX lets one nest, nested.

A program is data, so that a failing one can be shrunk and shown. Each block is a function from
an array to one of the same shape (a vector, or a matrix of 4 columns), so that any can be the
body of any form.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from .forms import BLOCKS, FORMS, NEEDS_FORWARD, NOT_FORWARD, STEPS

MAX_DEPTH = 4

FORM_NAMES = tuple(FORMS)
"""The forms that generated programs are made of."""


@dataclass(frozen=True)
class Step:
    """One operation."""

    name: str

    def lines(self) -> list[str]:
        """Return the program's text."""
        return [self.name]

    def __call__(self, x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
        """Apply it."""
        return STEPS[self.name](x, params)


@dataclass(frozen=True)
class Block:
    """Operations and forms, one after the other."""

    nodes: tuple[Step | Form, ...]

    def lines(self) -> list[str]:
        """Return the program's text."""
        return [line for node in self.nodes for line in node.lines()]

    def __call__(self, x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
        """Apply them."""
        for node in self.nodes:
            x = node(x, params)
        return x


@dataclass(frozen=True)
class Form:
    """Control flow or a transformation, of blocks."""

    name: str
    blocks: tuple[Block, ...]

    def lines(self) -> list[str]:
        """Return the program's text."""
        text = [f"{self.name}:"]
        for i, block in enumerate(self.blocks):
            text += ["or:"] if i else []
            text += [f"    {line}" for line in block.lines()]
        return text

    def __call__(self, x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
        """Apply it."""
        return FORMS[self.name](x, params, *self.blocks)


@dataclass(frozen=True)
class Program:
    """A loss function with a gradient; call it with its ``args()``.

    Attributes:
        body: what it does.
        rows: how many rows its input has.
    """

    body: Block
    rows: int

    def __call__(self, params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        """Return the loss."""
        return jnp.sum(jnp.sin(self.body(x, params)))

    def args(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return its inputs, always the same: small weights, and a matrix."""
        rng = np.random.default_rng(self.rows)
        shapes = {"a": (4, 4), "b": (4, 4), "stack": (2, 4, 4), "bias": (4,)}
        params = {name: rng.normal(size=s).astype(np.float32) / 2 for name, s in shapes.items()}
        return params, rng.normal(size=(self.rows, 4)).astype(np.float32)

    def __repr__(self) -> str:
        lines = "".join(f"\n    {line}" for line in self.body.lines())
        return f"Program of {self.rows} rows:{lines}\n"


def _block(depth: int, forward: bool) -> st.SearchStrategy[Block]:
    """Return blocks of so many levels of forms.

    Args:
        depth: the levels.
        forward: whether they must have a derivative in forward mode: no ``custom_vjp``.
    """
    step = st.sampled_from(sorted(STEPS)).map(Step)
    if depth == 0:
        return st.lists(step, min_size=1, max_size=2).map(tuple).map(Block)
    form = _form(depth, forward)
    shapes: list[st.SearchStrategy[tuple]] = [
        st.tuples(form),
        st.tuples(step, form),
        st.tuples(form, step),
    ]
    if depth < 3:  # two forms, of which one is shallow: compiling takes its time
        shapes.append(st.tuples(form, _form(1, forward)))
    return st.one_of(shapes).map(Block)


@st.composite
def _form(draw: st.DrawFn, depth: int, forward: bool, name: str | None = None) -> Form:
    if name is None:
        name = draw(st.sampled_from(sorted(FORMS.keys() - (NOT_FORWARD if forward else set()))))
    forward |= name in NEEDS_FORWARD
    # Only one of several branches is deep.
    depths = [depth - 1] + [0] * (BLOCKS.get(name, 1) - 1)
    return Form(name, tuple(draw(_block(below, forward)) for below in depths))


def programs(form: str | None = None, max_depth: int = MAX_DEPTH) -> st.SearchStrategy[Program]:
    """Return a strategy for programs of nested forms.

    Args:
        form: the outermost form, one of ``FORM_NAMES``; any if None.
        max_depth: how deep they are at most.
    """
    if form is not None and form not in FORMS:
        raise ValueError(f"Unknown form {form!r}. Known forms: {', '.join(FORM_NAMES)}.")
    step = st.sampled_from(sorted(STEPS)).map(Step)
    forms = st.integers(1, max_depth).flatmap(lambda depth: _form(depth, False, form))
    bodies = st.one_of(st.tuples(step, forms), st.tuples(forms, step)).map(Block)
    return st.builds(Program, body=bodies, rows=st.integers(1, 3))
