"""Private JAX that the tests need: checked on 0.10.2, 0.11.2 and 0.12.0.1."""

import jax
from jax._src import compiler

CHEAP = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options that make XLA compile a small program on the CPU in half of the time."""

if jax.__version_info__ < (0, 11):
    # The emitters that XLA fuses loops with take two thirds of the rest. Newer ones have no others.
    CHEAP["xla_cpu_use_fusion_emitters"] = False

FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in CHEAP.items())
"""The same for ``XLA_FLAGS``."""

cheap = True
"""Whether programs are compiled with them from now on."""


def compile_cheaply():
    """Make JAX compile with the options of CHEAP while ``cheap`` is true."""
    original = compiler.get_compile_options

    def get_compile_options(*args, env_options_overrides=None, **kwargs):
        given = env_options_overrides
        if cheap:
            given = {**CHEAP, **(given or {})}
        return original(*args, env_options_overrides=given, **kwargs)

    compiler.get_compile_options = get_compile_options
