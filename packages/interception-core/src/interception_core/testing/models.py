"""Models with the ids that every engine gives their operations.

Plain functions over pytrees, with named scopes, and none of them is jitted: whether
such a function's label is part of an id is the engine's choice (``labels_jit``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from . import model_functions

ANY = "(any)"
"""Stands for a provenance that an engine may know or not, such as that of a mapped row."""


@dataclass(frozen=True)
class Model:
    """A function, its inputs, and what is to be seen of it.

    Attributes:
        name: for reports.
        fn: the model.
        make_args: makes its positional arguments: pytrees of float32 arrays.
        targets: what is tapped.
        ids: the ids of those operations, each once, in the order in which they run.
        operands: for some ids, the provenances of the operands. Those of an operation in a loop
            or a branch are left out.
        staged: whether it has loops or branches, which JAX traces by themselves.
        differentiable: whether the sum of its result has a gradient.
    """

    name: str
    fn: Callable[..., jax.Array]
    make_args: Callable[[], tuple]
    targets: tuple[str, ...]
    ids: tuple[str, ...]
    operands: tuple[tuple[str, tuple[str | None, ...]], ...] = ()
    staged: bool = False
    differentiable: bool = True

    def __repr__(self) -> str:
        return self.name


def models() -> list[Model]:
    """Return the shared models."""
    dot, einsum, softmax = "jax.numpy.dot", "jax.numpy.einsum", "jax.nn.softmax"
    return [
        Model(
            "mlp",
            model_functions.mlp,
            model_functions.mlp_args,
            (dot,),
            (
                "encoder/layer_0/dot:0",
                "encoder/layer_0/dot:1",
                "encoder/layer_1/dot:0",
                "encoder/layer_1/dot:1",
                "dot:0",
            ),
            (
                ("encoder/layer_0/dot:0", ("args[1]", "args[0]['layer_0']['w']")),
                ("encoder/layer_0/dot:1", (None, "args[0]['shared']")),
                ("encoder/layer_1/dot:0", (None, "args[0]['layer_1']['w']")),
                ("encoder/layer_1/dot:1", (None, "args[0]['shared']")),
                ("dot:0", (None, "args[0]['shared']")),
            ),
        ),
        Model(
            "transformer",
            model_functions.transformer,
            model_functions.transformer_args,
            (einsum, softmax, "jax.nn.gelu"),
            (
                *(f"attention/einsum:{i}" for i in range(4)),
                "attention/softmax:0",
                *(f"attention/einsum:{i}" for i in range(4, 6)),
                "mlp/einsum:0",
                "mlp/gelu:0",
                "mlp/einsum:1",
            ),
            (
                ("attention/einsum:0", (None, None, "args[0]['attention']['q']")),
                ("attention/einsum:3", (None, None, None)),
                ("attention/einsum:5", (None, None, "args[0]['attention']['out']")),
                ("mlp/einsum:1", (None, None, "args[0]['mlp']['down']")),
            ),
        ),
        Model(
            "convolutions",
            model_functions.convolutions,
            model_functions.convolution_args,
            ("jax.lax.conv_general_dilated", "jax.numpy.mean", "jax.numpy.matmul"),
            (
                "stage/conv_general_dilated:0",
                "stage/conv_general_dilated:1",
                "head/mean:0",
                "head/matmul:0",
            ),
            (
                ("stage/conv_general_dilated:0", ("args[1]", "args[0][0]", None, None)),
                ("stage/conv_general_dilated:1", (None, "args[0][1]", None, None)),
                ("head/matmul:0", (None, "args[0][2]")),
            ),
        ),
        Model(
            "recurrent",
            model_functions.recurrent,
            model_functions.recurrent_args,
            (dot,),
            ("rnn/dot:0", "rnn/cell/scan(cell)/dot:0", "rnn/cell/scan(cell)/dot:1", "dot:0"),
            (
                ("rnn/dot:0", ("args[1]", "args[0]['embed']")),
                ("dot:0", (None, "args[0]['head']")),
            ),
            staged=True,
        ),
        Model(
            "layers in a scan",
            model_functions.layers_in_a_scan,
            model_functions.scan_args,
            (dot, softmax),
            (
                "blocks/dot:0",
                "blocks/up/scan(block)/dot:0",
                "blocks/up/scan(block)/softmax:0",
                "blocks/down/scan(block)/dot:0",
                "dot:0",
            ),
            (("blocks/dot:0", ("args[1]", "args[0]['in']")),),
            staged=True,
        ),
        Model(
            "branches",
            model_functions.branches,
            model_functions.branch_args,
            (dot,),
            (
                "first/wide/cond(wide)/dot:0",
                "first/wide/cond(wide)/dot:1",
                "first/cond(narrow)/dot:0",
                "second/switch(narrow)/dot:0",
                "second/wide/switch(wide)/dot:0",
                "second/wide/switch(wide)/dot:1",
            ),
            staged=True,
        ),
        Model(
            "iterations",
            model_functions.iterations,
            model_functions.iteration_args,
            (dot,),
            ("fori_loop(outer)/dot:0", "solve/while_body(advance)/dot:0"),
            staged=True,
            differentiable=False,
        ),
        Model(
            "per example",
            model_functions.per_example,
            model_functions.per_example_args,
            (dot,),
            ("update/energy/dot:0", "dot:0"),
            (
                ("update/energy/dot:0", (ANY, "args[0]['w']")),
                ("dot:0", (None, "args[0]['head']")),
            ),
        ),
    ]
