"""Warm-ups: once per call site and loaded executable, never per call."""

import jax
import jax.numpy as jnp
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.processes import run_python

HEAD = """
import jax, jax.numpy as jnp, numpy as np
import te_ffi_kernels as te

TARGET = "te_ffi_kernels.gemm_w8a8"
count = lambda: te.warm_counts().get(TARGET, 0)
w = te.pack_w8(jnp.ones((64, 16), jnp.int8), jnp.ones((1, 16)))
x = jnp.ones((4, 64))

def two_sites(x, w):
    # The first is its own input, so that both sites stay.
    return te.gemm_w8a8(te.gemm_w8a8(x, w) @ jnp.ones((16, 64)), w)
"""


def run(code, **environment):
    return run_python("-c", HEAD + code, **environment).stdout.split()


@pytest.mark.slow
def test_once_per_site_and_never_per_call():
    code = """
compiled = jax.jit(two_sites).lower(x, w).compile()
print(count())
for _ in range(5):
    jax.block_until_ready(compiled(x, w))
print(count())
again = jax.jit(lambda x, w: two_sites(x, w) + 1).lower(x, w).compile()
jax.block_until_ready(again(x, w))
print(count())
"""
    assert run(code) == ["2", "2", "4"]


@pytest.mark.slow
def test_once_per_load_from_the_compilation_cache(tmp_path):
    code = f"""
jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
y = jax.jit(two_sites)(x, w)
jax.block_until_ready(jax.jit(two_sites)(x, w))
print(count(), sum("cache_hits" in hit for hit in hits) > 0, float(y.sum()))
"""
    first, second = run(code), run(code)
    assert (first[0], second[0]) == ("2", "2")
    assert (first[1], second[1]) == ("False", "True")
    assert first[2] == second[2]


@pytest.mark.slow
def test_once_per_reload_of_an_export(tmp_path):
    saved = tmp_path / "program"
    run(f"""
def product(x, buffer):
    return te.gemm_w8a8(x, te.PackedWeight(buffer, 64, 16, 8, 0))

checks = te.export_checks()
exported = jax.export.export(jax.jit(product), disabled_checks=checks)(x, w.buffer)
open({str(saved)!r}, "wb").write(exported.serialize())
""")
    code = f"""
te.register()
program = jax.export.deserialize(bytearray(open({str(saved)!r}, "rb").read()))
before = count()
call = jax.jit(program.call)
y = call(x, w.buffer)
for _ in range(5):
    jax.block_until_ready(call(x, w.buffer))
print(count() - before, bool((y == te.gemm_w8a8(x, w)).all()))
"""
    assert run(code) == ["1", "True"]


@pytest.mark.slow
def test_warmup_warms_a_whole_program():
    code = """
program = te.warmup(two_sites, jax.ShapeDtypeStruct(x.shape, x.dtype), w)
warm = count()
jax.block_until_ready(program(x, w))
print(warm, count())
"""
    assert run(code) == ["2", "2"]


@pytest.mark.slow
def test_a_bad_instruction_set_is_an_error_of_the_program():
    code = """
try:
    jax.block_until_ready(te.gemm_w8a8(x, w))
except Exception as error:
    print(type(error).__name__, "neon" in str(error), "generic" in str(error))
print(len(jax.devices()))
"""
    head = HEAD.replace("w = te.pack_w8", "w = te.reference.pack_w8")
    said = run_python("-c", head + code, JAXTAP_ISA="neon").stdout
    assert said.split() == ["JaxRuntimeError", "True", "True", "1"]


def test_stages_of_each_target():
    for target in te.targets():
        found = te.stages(target)
        assert found.target == target
        assert "execute" in found.names
        assert ("instantiate" in found.names) == (found.why_no_warm_up is None)
    assert te.stages("gemm_w8a8") == te.stages("te_ffi_kernels.gemm_w8a8")
    with pytest.raises(ValueError, match="gemm_w8a8"):
        te.stages("gemm_w9")


def test_warmup_takes_jitted_functions():
    w = te.pack_w8(jnp.ones((64, 16), jnp.int8), jnp.ones((1, 16)))
    program = te.warmup(jax.jit(te.gemm_w8a8), jnp.ones((2, 64)), w)
    assert program(jnp.ones((2, 64)), w).shape == (2, 16)
