"""Calls: kernels in a compiled program, per device."""

import re

import jax
import jax.numpy as jnp


def workspace():
    """Return the result that some targets have on GPUs besides: memory, unused for few rows."""
    on_gpu = jax.default_backend() == "gpu"
    return [jax.ShapeDtypeStruct((1,), jnp.uint8)] if on_gpu else []


def calls(compiled, op=""):
    """Return the lines of a program that call an op."""
    target = f'custom_call_target="te_ffi_kernels.{op}' + ('"' if op else "")
    return [line for line in compiled.as_text().splitlines() if target in line]


PARTS = ("index", "group_sizes", "rotation", "x_scale", "bias", "residual", "clamps")
"""Attributes of matmuls and convolutions that say what there is beside x and a weight."""


def told(compiled):
    """Return what a program calls, such as "gemm_w8a8 index bias": ops, and what they are told."""
    return [
        " ".join([
            re.search(r'custom_call_target="te_ffi_kernels\.(\w+)"', line)[1],
            *(part for part in PARTS if re.search(rf"\b{part} = (?!0 )", line)),
        ])
        for line in calls(compiled)
    ]  # fmt: skip


def assert_block(compiled, op, block, case=""):
    """Assert that a program calls an op once, with an array type."""
    found = calls(compiled, op)
    assert len(found) == 1, (op, case, found)
    assert block in found[0], (op, case, block, found[0])
