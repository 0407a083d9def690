"""Private JAX that the tests need: checked on 0.10.2, 0.11.2 and 0.12.0.1."""

import gc
import hashlib
import io
import itertools
from collections import OrderedDict

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

_compiled = OrderedDict()


def compile_cheaply():
    """Make JAX compile with the options of CHEAP while ``cheap`` is true."""
    original = compiler.get_compile_options

    def get_compile_options(*args, env_options_overrides=None, **kwargs):
        given = env_options_overrides
        backend = kwargs.get("backend")
        # XLA has no unoptimized code for GPUs: with these options it says so and may be wrong.
        if cheap and (backend is None or backend.platform == "cpu"):
            given = {**CHEAP, **(given or {})}
        return original(*args, env_options_overrides=given, **kwargs)

    compiler.get_compile_options = get_compile_options


def compile_once(most=2000):
    """Let XLA compile a program once, however often it is traced again.

    Tests trace the same functions again and again, and a tapped one is often the plain one's text.
    Custom calls may have state or point into this process: each such program is compiled, and so is
    what is compiled as for users.

    Args:
        most: How many programs are kept; the oldest goes first.
    """
    original = compiler.backend_compile_and_load

    def backend_compile_and_load(backend, module, devices, options, host_callbacks):
        if not cheap:
            return original(backend, module, devices, options, host_callbacks)
        text = io.BytesIO()
        module.operation.write_bytecode(file=text)
        text = text.getvalue()
        if host_callbacks or b"custom_call" in text:
            return original(backend, module, devices, options, host_callbacks)
        digest = hashlib.sha256(options.SerializeAsString())
        digest.update(text)
        key = backend, tuple(devices), digest.digest()
        executable = _compiled.get(key)
        if executable is None:
            executable = original(backend, module, devices, options, host_callbacks)
            _compiled[key] = executable
            if len(_compiled) > most:
                _compiled.popitem(last=False)
        return executable

    compiler.backend_compile_and_load = backend_compile_and_load
    # The cache on disk would find nothing, as its key differs from program to program.
    jax.config.update("jax_enable_compilation_cache", False)


def forget_programs():
    """Forget the programs that ``compile_once`` keeps."""
    _compiled.clear()


def lower_cheaply(programs=100):
    """Make MLIR contexts for many programs each, with only the dialects that JAX's programs use.

    JAX 0.10 makes one for each program: a sixth of the time of all tests. Newer JAX keeps its own.

    Args:
        programs: How many programs share a context, which keeps their types and constants.
    """
    if jax.__version_info__ >= (0, 11):
        return
    # Other dialects that a program needs are loaded when it is parsed.
    mlir.JaxIrContext.load_all_available_dialects = lambda context: context.dialects["func"]
    original = mlir.make_ir_context
    made = itertools.count()
    context = None

    def make_ir_context():
        nonlocal context
        if next(made) % programs == 0:
            context = original()
        return context

    mlir.make_ir_context = make_ir_context


def explain_leaks():
    """Let JAX find what holds a leaked tracer."""
    original = core.leaked_tracer_error

    def leaked_tracer_error(*args):
        gc.unfreeze()
        return original(*args)

    core.leaked_tracer_error = leaked_tracer_error
