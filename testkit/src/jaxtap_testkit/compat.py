"""Private JAX that the tests need: checked on 0.10.2, 0.11.2 and 0.12.0.1."""

import gc

import jax
from jax._src import compiler, core
from jax._src.interpreters import mlir

CHEAP = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    # Parts of a program, compiled side by side, cost a third more than the whole.
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Options that make XLA compile a small program on the CPU in a third of the time."""

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


def lower_cheaply():
    """Load the MLIR dialects that JAX's programs are made of, not all that there are.

    JAX 0.10 makes a context for each program, and 3 of its 4 ms go to the other dialects. Those
    that a program needs in spite of it are loaded when it is parsed. Newer JAX keeps its contexts.
    """
    if jax.__version_info__ < (0, 11):
        mlir.JaxIrContext.load_all_available_dialects = lambda context: context.dialects["func"]


def explain_leaks():
    """Let JAX see who holds a leaked tracer, also among what ``checking_leaks`` set aside."""
    original = core.leaked_tracer_error

    def leaked_tracer_error(*args):
        gc.unfreeze()
        return original(*args)

    core.leaked_tracer_error = leaked_tracer_error
