"""Warm-ups: once per call site and loaded executable, never per call."""

import sys

import jax
import jax.export
import jax.numpy as jnp
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.processes import run_python

TARGET = "te_ffi_kernels.gemm_w8a8"
HEAD = """
import sys
from pathlib import Path
import jax, jax.export, jax.numpy as jnp, numpy as np
import te_ffi_kernels as te

count = lambda: te.warm_counts().get("te_ffi_kernels.gemm_w8a8", 0)
w = te.pack_w8(jnp.ones((64, 16), jnp.int8), jnp.ones((1, 16)))
x = jnp.ones((4, 64))
"""
LOADED = """
folder = sys.argv[1]
jax.config.update("jax_compilation_cache_dir", folder + "/programs")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))

def two_sites(x, w):
    # The first is its own input, so that both sites stay.
    return te.gemm_w8a8(te.gemm_w8a8(x, w) @ jnp.ones((16, 64)), w)

y = jax.jit(two_sites)(x, w)
jax.block_until_ready(jax.jit(two_sites)(x, w))
print(count(), sum("cache_hits" in hit for hit in hits) > 0, float(y.sum()))
# An export that is loaded again.
program = jax.export.deserialize(bytearray(Path(folder, "exported").read_bytes()))
before = count()
call = jax.jit(program.call)
y = call(x, w.buffer)
for _ in range(5):
    jax.block_until_ready(call(x, w.buffer))
print(count() - before, bool((y == te.gemm_w8a8(x, w)).all()))
"""


def operands():
    return jnp.ones((4, 64)), te.pack_w8(jnp.ones((64, 16), jnp.int8), jnp.ones((1, 16)))


def two_sites(x, w):
    # The first is its own input, so that both sites stay.
    return te.gemm_w8a8(te.gemm_w8a8(x, w) @ jnp.ones((16, 64)), w)


def warmed(before):
    return te.warm_counts().get(TARGET, 0) - before


def test_once_per_site_and_never_per_call():
    x, w = operands()
    before = warmed(0)
    compiled = jax.jit(two_sites).lower(x, w).compile()
    assert warmed(before) == 2
    for _ in range(5):
        jax.block_until_ready(compiled(x, w))
    assert warmed(before) == 2
    again = jax.jit(lambda x, w: two_sites(x, w) + 1).lower(x, w).compile()
    jax.block_until_ready(again(x, w))
    assert warmed(before) == 4


def test_warmup_warms_a_whole_program():
    x, w = operands()
    before = warmed(0)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    program = te.warmup(lambda x, w: two_sites(x, w) + 2, like, w)
    assert warmed(before) == 2
    jax.block_until_ready(program(x, w))
    assert warmed(before) == 2


@pytest.mark.slow
def test_once_per_load_from_the_compilation_cache_and_of_an_export(tmp_path):
    x, w = operands()

    def product(x, buffer):
        return te.gemm_w8a8(x, te.PackedWeight(buffer, 64, 16, 8, 0))

    exported = jax.export.export(jax.jit(product), disabled_checks=te.export_checks())(x, w.buffer)
    (tmp_path / "exported").write_bytes(exported.serialize())
    first, second = (run_python("-c", HEAD + LOADED, tmp_path).stdout.split() for _ in range(2))
    assert first[:2] == ["2", "False"]
    assert second[:2] == ["2", "True"]
    assert first[2] == second[2]
    assert first[3:] == second[3:] == ["1", "True"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which pages are mapped")
def test_the_first_warm_up_has_the_code_of_all_kernels_in_memory():
    code = """
import re
from te_ffi_kernels import _native

def pages():
    # Of the mapping of code in KiB: all of it, and what is mapped.
    for part in re.split(r"(?m)^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text()):
        if _native.__file__ in part and " r-xp " in part:
            return [int(re.search(f"{name}: +([0-9]+)", part)[1]) for name in ("Size", "Rss")]

size, before = pages()
compiled = jax.jit(te.gemm_w8a8).lower(x, w).compile()
_, after = pages()
compiled(x, w)
compiled(x, w)
print(count(), before < size, after == size)
"""
    # Packing a weight calls a kernel, so that the code would be in memory before.
    head = HEAD.replace("w = te.pack_w8", "w = te.reference.pack_w8")
    assert run_python("-c", head + code).stdout.split() == ["1", "True", "True"]


@pytest.mark.slow
def test_a_bad_instruction_set_is_an_error_of_the_program():
    code = """
try:
    jax.block_until_ready(te.gemm_w8a8(x, w))
except Exception as error:
    print(type(error).__name__, "sve" in str(error), "generic" in str(error))
print(len(jax.devices()))
"""
    head = HEAD.replace("w = te.pack_w8", "w = te.reference.pack_w8")
    said = run_python("-c", head + code, JAXTAP_ISA="sve").stdout
    assert said.split() == ["JaxRuntimeError", "True", "True", "1"]


def test_stages_of_each_target():
    for target in te.targets():
        found = te.stages(target)
        assert found.target == target
        assert found.names == ("execute", "instantiate")
    assert te.stages("gemm_w8a8") == te.stages("te_ffi_kernels.gemm_w8a8")
    with pytest.raises(ValueError, match="gemm_w8a8"):
        te.stages("gemm_w9")


def test_warmup_takes_jitted_functions():
    w = te.pack_w8(jnp.ones((64, 16), jnp.int8), jnp.ones((1, 16)))
    program = te.warmup(jax.jit(te.gemm_w8a8), jnp.ones((2, 64)), w)
    assert program(jnp.ones((2, 64)), w).shape == (2, 16)
