"""flax.serialization writes quantized arrays, whatever was imported first."""

import jax
import numpy as np
import pytest

import quant_numerics as qn
from jaxtap_testkit.processes import run_python

serialization = pytest.importorskip("flax.serialization")


def stored(qtype, **options):
    w = jax.random.normal(jax.random.key(0), (8, 6))
    return qn.quantize(w, qtype, channel_axes=(1,), **options)


@pytest.mark.slow
def test_arrays_come_back():
    tree = {"int8": stored("int8"), "int4": stored("int4"), "int5": qn.pack(stored("int5"))}
    read = serialization.from_bytes(tree, serialization.to_bytes(tree))
    assert jax.tree.structure(read) == jax.tree.structure(tree)
    for one, other in zip(jax.tree.leaves(read), jax.tree.leaves(tree), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_another_format_is_an_error():
    state = serialization.to_state_dict(stored("int8"))
    with pytest.raises(ValueError, match=r"saved as int8 .* got a target that is int4"):
        serialization.from_state_dict(stored("int4"), state)


@pytest.mark.slow
@pytest.mark.parametrize("flax_first", [True, False])
def test_the_order_of_imports_does_not_matter(flax_first):
    imports = ["import flax.serialization as fs", "import quant_numerics as qn, jax.numpy as jnp"]
    code = """
import sys
{}
q = qn.quantize(jnp.ones((4, 4)), "int8", channel_axes=(1,))
assert {} == ("flax" in sys.modules)
{}
assert fs.from_bytes(q, fs.to_bytes(q)).qtype == "int8"
"""
    first, second = imports if flax_first else imports[::-1]
    late = "" if flax_first else second
    run_python("-c", code.format(f"{first}\n{second}" if flax_first else first, flax_first, late))
