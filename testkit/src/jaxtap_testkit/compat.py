"""Private JAX that the tests need: checked on 0.10.2, 0.11.2 and 0.12.0.1."""

import contextlib
import functools
import gc
import hashlib
import io
import os
import platform
import re
import threading
import zlib
from collections import OrderedDict
from pathlib import Path

import jax
import jaxlib
import numpy as np
from jax._src import compiler, core, dtypes, literals
from jax._src.interpreters import mlir, pxla

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

is_cheap = True
"""Whether programs are compiled with them now; see ``compiling``."""

_how = jax.make_user_context("cheap")

_compiled = OrderedDict()


@contextlib.contextmanager
def compiling(*, cheap):
    """Compile with the options of CHEAP meanwhile, or without.

    JAX keeps both apart, as what a context says is a part of its keys. So nothing is forgotten.
    """
    global is_cheap
    before, is_cheap = is_cheap, cheap
    try:
        with _how("cheap" if cheap else "as for users"):
            yield
    finally:
        is_cheap = before


def compile_cheaply():
    """Make JAX compile with the options of CHEAP while ``is_cheap`` is true."""
    original = compiler.get_compile_options

    def get_compile_options(*args, env_options_overrides=None, **kwargs):
        given = env_options_overrides
        backend = kwargs.get("backend")
        # XLA has no unoptimized code for GPUs: with these options it says so and may be wrong.
        if is_cheap and (backend is None or backend.platform == "cpu"):
            given = {**CHEAP, **(given or {})}
        return original(*args, env_options_overrides=given, **kwargs)

    compiler.get_compile_options = get_compile_options


def compile_once(folder, most=2000):
    """Let XLA compile a program once, however often and in whatever process it is traced again.

    Tests trace the same functions again and again, and a tapped one is often the plain one's text.
    Custom calls may have state, so that a process shares no program with them, or point into the
    process: but for those of JAX and of our kernels, such programs are compiled each time, and so
    is what is compiled as for users.

    Args:
        folder: Where programs are kept for other processes and runs; None for nowhere.
        most: How many programs are kept in this process; the oldest goes first.
    """
    original = compiler.backend_compile_and_load
    machine = _machine()

    def backend_compile_and_load(backend, module, devices, options, host_callbacks):
        if not is_cheap:
            return original(backend, module, devices, options, host_callbacks)
        text = io.BytesIO()
        module.operation.write_bytecode(file=text)
        text = text.getvalue()
        has_calls = b"custom_call" in text
        if host_callbacks or (has_calls and not _NAMED.issuperset(_CALL.findall(str(module)))):
            return original(backend, module, devices, options, host_callbacks)
        digest = hashlib.sha256(options.SerializeAsString())
        digest.update(text)
        key = backend, tuple(devices), digest.digest()
        if key in _compiled:
            return _compiled[key]
        file = executable = None
        if folder is not None and backend.platform == "cpu":
            digest.update(f"{machine} {[device.id for device in devices]}".encode())
            file = folder / digest.hexdigest()
            executable = _loaded(file, backend, devices, options)
        if executable is None:
            executable = original(backend, module, devices, options, host_callbacks)
            if file is not None:
                _keep(file, executable)
        if not has_calls:
            _compiled[key] = executable
            if len(_compiled) > most:
                _compiled.popitem(last=False)
        return executable

    compiler.backend_compile_and_load = backend_compile_and_load
    # JAX's cache on disk would find nothing, as its key differs from program to program.
    jax.config.update("jax_enable_compilation_cache", False)


_CALL = re.compile(r"custom_call @(te_ffi_kernels|lapack_|Sharding|SPMD|\w*)")
_NAMED = frozenset(("te_ffi_kernels", "lapack_", "Sharding", "SPMD"))
"""What the names of custom calls begin with that a program on disk finds in any process."""


def _machine():
    """Return what compiled programs depend on beside their text: XLA, and the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    features = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return f"{jaxlib.__version__} {platform.machine()} {sorted(features or lines)}"


def _loaded(file, backend, devices, options):
    """Return the program of a file; None if there is none."""
    try:
        program = zlib.decompress(file.read_bytes())
        os.utime(file)  # what is used stays
    except (FileNotFoundError, zlib.error):
        return None
    return backend.deserialize_executable(program, devices, options)


def _keep(file, executable):
    # Others read it when it is whole.
    part = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    part.write_bytes(zlib.compress(executable.serialize(), 1))
    part.replace(file)


def forget_old_programs(folder, most=60_000):
    """Delete the programs on disk that were not used for the longest time, but ``most``."""
    files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[most:]:
        file.unlink()


def forget_programs():
    """Forget the programs that ``compile_once`` keeps."""
    _compiled.clear()


def lower_cheaply(programs=100):
    """Make MLIR contexts for many programs each, with only the dialects that JAX's programs use.

    JAX 0.10 makes one for each program: a sixth of the time of all tests. Newer JAX keeps its own.
    Each thread has its own: a context loads dialects as they are needed, without a lock, and XLA
    does so without the GIL.

    Args:
        programs: How many programs share a context, which keeps their types and constants.
    """
    if jax.__version_info__ >= (0, 11):
        return
    # Other dialects that a program needs are loaded when it is parsed.
    mlir.JaxIrContext.load_all_available_dialects = lambda context: context.dialects["func"]
    original = mlir.make_ir_context
    # Not a threading.local, which dies with each call that a thread of XLA makes into Python.
    kept = {}

    def make_ir_context():
        thread = threading.get_ident()
        context, left = kept.get(thread, (None, 0))
        if not left:
            context, left = original(), programs
        kept[thread] = context, left - 1
        return context

    mlir.make_ir_context = make_ir_context


def make_arrays_cheaply():
    """Make arrays of NumPy's, and those of one number or of a count, without a program.

    Outside of jit JAX compiles one for each shape and dtype, of ``jnp.asarray`` and ``jnp.ones``,
    too: a sixth of all that the tests compiled. Here NumPy makes the same bits. Where it may not
    (small floats, floats that become integers), or where an array has a place, JAX does.
    """
    for primitive, make in (
        (jax.lax.stage_p, _staged),
        (jax.lax.convert_element_type_p, _converted),
        (jax.lax.broadcast_in_dim_p, _repeated),
        (jax.lax.iota_p, _counted),
    ):
        primitive.def_impl(functools.partial(_made, make, primitive.impl))


def _made(make, original, *operands, **params):
    array = make(*operands, **params) if _no_place() else None
    if array is None:
        return original(*operands, **params)
    aval = core.ShapedArray(array.shape, array.dtype)
    device = jax.local_devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    return pxla.batched_device_put(aval, sharding, [array], [device], committed=False)


def _no_place():
    return (
        jax.config.jax_default_device is None
        and jax.sharding.get_abstract_mesh().empty
        and jax.local_devices()[0].platform == "cpu"
    )


def _of_numpy(x):
    """Return a new array of NumPy, with a dtype that JAX has; None for what is another thing."""
    if isinstance(x, literals.TypedNdArray):
        return None if x.weak_type else np.array(x.val)
    if type(x) not in (np.ndarray, bool, int, float):
        return None
    x = np.asarray(x)
    return x.astype(dtypes.canonicalize_dtype(x.dtype)) if x.dtype.kind in "biuf" else None


def _staged(x):
    return None if isinstance(x, bool | int | float) else _of_numpy(x)  # which are weakly typed


def _converted(x, *, new_dtype, weak_type, sharding):
    x = None if weak_type or sharding is not None else _of_numpy(x)
    if x is None or x.dtype == new_dtype:
        return x
    new = np.dtype(new_dtype)
    kinds = x.dtype.kind, new.kind
    if kinds not in (("f", "f"), ("i", "f"), ("u", "f"), ("b", "f")) and not (
        kinds[0] in "biu" and kinds[1] in "iu"
    ):
        return None
    with np.errstate(all="ignore"):
        return x.astype(new)


def _repeated(x, *sizes, shape, broadcast_dimensions, sharding):
    plain = isinstance(x, jax.Array) and not (x.weak_type or x.committed or sizes)
    return np.full(shape, x, x.dtype) if plain and x.ndim == 0 and sharding is None else None


def _counted(*sizes, dtype, shape, dimension, sharding):
    if sizes or sharding is not None or np.dtype(dtype).kind not in "iuf":
        return None
    along = [-1 if axis == dimension else 1 for axis in range(len(shape))]
    return np.broadcast_to(np.arange(shape[dimension], dtype=dtype).reshape(along), shape)


def explain_leaks():
    """Let JAX find what holds a leaked tracer."""
    original = core.leaked_tracer_error

    def leaked_tracer_error(*args):
        gc.unfreeze()
        return original(*args)

    core.leaked_tracer_error = leaked_tracer_error
