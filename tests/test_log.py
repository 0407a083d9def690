"""Logging: silent unless a program or `JAXTAP_DEBUG` asks for it."""

import os
import subprocess
import sys

PROGRAM = """
import jax.numpy as jnp
import te_ffi_kernels as te

te.scaled_softmax_fwd(jnp.ones((1, 1, 4, 16)), 1.0)
"""


def printed(**variables: str) -> tuple[str, str]:
    """Return stdout and stderr of a process that calls a kernel."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout, done.stderr


def test_nothing_is_printed_unless_asked_for():
    assert printed(JAXTAP_DEBUG="0") == ("", "")


def test_debug_prints_plugins_and_kernels():
    out, err = printed(JAXTAP_DEBUG="1")
    assert out == ""
    lines = err.splitlines()
    assert all(" ms jaxtap." in line for line in lines)
    (plugin,) = [line for line in lines if "jaxtap.plugins: plugin 'te-ffi-kernels'" in line]
    assert ": ok (" in plugin
    (chosen,) = [line for line in lines if "jaxtap.kernels: scaled_softmax_forward(" in line]
    assert "te_ffi_kernels.scaled_softmax_forward (priority" in chosen
    assert any("registered with XLA" in line for line in lines)
