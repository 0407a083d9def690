"""Logging: what `JAXTAP_DEBUG` asks for. That it is silent else, test_first_use.py tests."""

from jaxtap_testkit.processes import run_python

PROGRAM = """
import jax.numpy as jnp
import te_ffi_kernels as te

te.scaled_softmax_fwd(jnp.ones((1, 1, 4, 16)), 1.0)
"""


def test_debug_prints_plugins_and_kernels():
    done = run_python("-c", PROGRAM, JAXTAP_DEBUG="1")
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert all(" ms jaxtap." in line for line in lines)
    (plugin,) = [line for line in lines if "jaxtap.plugins: plugin 'te-ffi-kernels'" in line]
    assert ": ok (" in plugin
    (chosen,) = [line for line in lines if "jaxtap.kernels: scaled_softmax_forward(" in line]
    assert "te_ffi_kernels.scaled_softmax_forward (priority" in chosen
    assert any("registered with XLA" in line for line in lines)
