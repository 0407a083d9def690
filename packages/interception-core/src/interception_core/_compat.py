"""Private JAX: the only place that depends on JAX's version.

All names were checked on 0.10.2, 0.11.2 and 0.12.0. A comment at an import says which versions
have it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import jax
import jaxlib
from jax._src import ad_checkpoint as _ad_checkpoint  # 0.10.2 - 0.12
from jax._src import core as _core  # 0.10.2 - 0.12
from jax._src import hijax as _hijax  # 0.10.2 - 0.12
from jax._src import shard_map as _shard_map  # 0.10.2 - 0.12
from jax._src import source_info_util as _source_info  # 0.10.2 - 0.12
from jax._src import traceback_util as _traceback  # 0.10.2 - 0.12
from jax._src.interpreters import ad as _ad  # 0.10.2 - 0.12
from jax._src.interpreters import batching as _batching  # 0.10.2 - 0.12
from jax._src.interpreters import mlir as _mlir  # 0.10.2 - 0.12
from jax._src.interpreters import partial_eval as _pe  # 0.10.2 - 0.12
from jax._src.interpreters import remat as _remat  # 0.10.2 - 0.12
from jax.extend import source_info_util
from jax.extend.core import primitives as _public_primitives
from jaxlib import xla_client as _xla_client  # 0.10.2 - 0.12

P = ParamSpec("P")
R = TypeVar("R")


def hide_frames(folder: str | Path) -> None:
    """Hide a package's frames as JAX hides its own.

    Operations then have the source line of the program that the package traces. Tracebacks of
    errors that go through a function of ``hides_frames``, or through a function of JAX such as
    ``jax.jit``, leave the package's frames out, unless ``JAX_TRACEBACK_FILTERING=off`` is set.

    Args:
        folder: of the package: ``Path(__file__).parent``.
    """
    source_info_util.register_exclusion(str(folder))
    _traceback.register_exclusion(str(folder))


def hides_frames(fn: Callable[P, R]) -> Callable[P, R]:
    """Return ``fn``, whose errors have a traceback without hidden frames.

    Put it on functions that users call and that call users' functions. Nested ones cost nothing:
    the outermost shortens the traceback.

    Args:
        fn: the function.
    """
    return _traceback.api_boundary(fn)


hide_frames(Path(__file__).parent)

PjitFunction: type = type(jax.jit(lambda: None))
"""The C++ type of every jitted function."""

NameScope: type = type(jax.named_scope(""))
"""The class of ``jax.named_scope(...)``, which has Python methods to enter and exit.

JAX's decorators and the module calls of flax and equinox use it.
"""

lower_jaxpr_to_module: FunctionType = _mlir.lower_jaxpr_to_module
"""Runs all lowering rules.

Rules made by ``mlir.lower_fun`` trace lax functions. Those are not operations of the program, and
must not be tapped.
"""

rule_runners: tuple[FunctionType, ...] = (
    _ad.JVPTrace.process_primitive,
    _ad.LinearizeTrace.process_primitive,
    _batching.BatchTrace.process_primitive,
    _remat.RematTrace.process_primitive,
    _shard_map.ShardMapTrace.process_primitive,
    _pe.JaxprTrace.process_primitive,
)
"""Run the rules of primitives (derivative, batching, partial evaluation, ...).

Called with the trace, the primitive, its operands and its parameters. These rules call lax
functions, too. Code of the program runs inside of them only in the rules of ``custom_vjp``,
``custom_jvp`` and ``custom_vmap``.
"""

_CUSTOM_PRIMS: tuple[type, ...] = tuple(
    getattr(_hijax, name)
    for name in ("CustomJVPTraced", "CustomVJPTraced")
    if hasattr(_hijax, "vmap_rule")  # 0.12
)


def runs_custom_rule(trace: Any, primitive: Any, params: Any) -> bool:
    """Return whether a primitive's derivative is a rule of the program, and nothing else.

    JAX 0.12 has such primitives with its flags ``jax_custom_jvp3`` and ``jax_custom_vjp3``.
    """
    if primitive is not _hijax.call_hi_primitive_p or not isinstance(trace, _DERIVATIVES):
        return False
    return isinstance(params["_prim"], _CUSTOM_PRIMS)


_DERIVATIVES = (_ad.JVPTrace, _ad.LinearizeTrace)

backward_pass: FunctionType = _ad.backward_pass3
"""Runs the transpose rules. See ``rule_runners``."""

tracers: tuple[FunctionType, ...] = tuple(
    getattr(_pe, name)
    for name in ("trace_to_jaxpr_dynamic", "trace_to_jaxpr_nocache")
    if hasattr(_pe, name)  # the second since 0.11
)
"""Trace a function to a jaxpr. See ``traces_kernel``."""


def traces_kernel(function: Any, avals: Any, debug_info: Any = None, *_: Any, **__: Any) -> bool:
    """Return whether one of ``tracers`` is called with the body of a Pallas kernel.

    Asking what is traced needs no import of Pallas, and works for functions that Pallas made
    before: ``pallas_call``, ``kernel``, and what others build of the primitives of these.
    """
    info = function.debug_info if debug_info is None else debug_info
    return info is not None and info.traced_for.startswith(("pallas", "mpmd_map"))


evaluations: tuple[FunctionType, ...] = (
    _ad_checkpoint.remat_impl,
    *(prim.expand for prim in _CUSTOM_PRIMS),
    *([_ad_checkpoint.RematTraced.expand] if _CUSTOM_PRIMS else []),
)
"""Evaluate a program that ``jax.checkpoint`` or a function with custom rules has traced.

It was tapped when it was traced. Where JAX 0.12 has the flags of ``_CUSTOM_PRIMS``, and
``jax_remat3``, these functions are HiPrims, which JAX expands.
"""

SETTLED = "jaxtap.settled"
"""Prefix of the name scope of operations that a rule or a handler adds to an observed program."""


def settled(name: str = SETTLED) -> Any:
    """Return a context manager that marks operations as not the program's."""
    # extend_name_stack would make the name a part of the module path.
    return _source_info.set_name_stack(_source_info.current_name_stack().extend(name))


def is_settled() -> bool:
    """Return whether operations are marked as not the program's."""
    stack = _source_info.current_name_stack().stack
    return any(entry.name.startswith(SETTLED) for entry in stack)


def unsettled() -> Any:
    """Return a context manager that ends the mark of ``settled``."""
    stack = _source_info.current_name_stack()
    kept = tuple(entry for entry in stack.stack if not entry.name.startswith(SETTLED))
    return _source_info.set_name_stack(_source_info.NameStack(kept))


def is_tangent(value: Any) -> bool:
    """Return whether a value is a tangent in a derivative's rule that JAX transposes."""
    return isinstance(value, _pe.JaxprTracer) and not value.is_known()


Primitive: type = _core.Primitive


def traced_function(fn: Any) -> Any:
    """Return the Python function that a ``PjitFunction`` traces."""
    return fn._fun


def staging_trace() -> Any | None:
    """Return the innermost trace that builds a jaxpr, or None.

    Traces of ``grad``, ``vmap`` and ``jvp`` are skipped: they evaluate in the trace around them.
    """
    trace = _core.trace_ctx.trace
    while trace is not None and not hasattr(trace, "frame"):
        trace = getattr(trace, "parent_trace", None)
    return trace


def trace_label(trace: Any) -> str:
    """Return what a staging trace traces, as ``jit(block)`` or ``scan(body)``."""
    info = trace.frame.debug_info
    if info is None:
        return "trace"
    return f"{info.traced_for.split(' ')[0]}({info.func_name})".replace("/", ".")


def primitives() -> dict[str, Any]:
    """Return all primitives with a name in JAX or a lowering.

    The lowering tables also have the primitives of other libraries.
    """
    tables = [_mlir._lowerings, *_mlir._platform_specific_lowerings.values()]
    lowered = [primitive for table in tables for primitive in table]
    public = [p for p in vars(_public_primitives).values() if isinstance(p, Primitive)]
    # It expands to other operations before it is lowered, so it has no lowering.
    high = [_hijax.call_hi_primitive_p]
    return {primitive.name: primitive for primitive in (*lowered, *public, *high)}


jaxlib_version: str = jaxlib.__version__


def start_backend(platform: str) -> None:
    """Start the backend of a platform, if it is not running."""
    jax.devices(platform)


@cache
def ffi_api_version() -> tuple[int, int] | None:
    """Return the newest version of XLA's FFI that jaxlib runs.

    jaxlib's Python API does not have the version. The headers that jaxlib ships are those that it
    was built with (0.10.2: 0.3, 0.11.2: 0.4, 0.12: 0.5).

    Returns:
        (major, minor); None if the headers are missing. Then only XLA checks handlers.
    """
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    if not header.is_file():
        return None
    text = header.read_text(encoding="utf-8")
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    major, minor = (int(match[1]) if match else None for match in found)
    return None if major is None or minor is None else (major, minor)


def _xla_platform(platform: str) -> str:
    # XLA's registry of targets has these names for platforms.
    return {"cpu": "cpu", "cuda": "CUDA", "rocm": "ROCM"}.get(platform, platform)


def ffi_targets(platform: str) -> set[str]:
    """Return the names of all targets that XLA has for a platform.

    Targets that wait for the backend to start are not among them.
    """
    name = _xla_platform(platform)
    return set(_xla_client.custom_call_targets(_xla_client.xla_platform_names.get(name, name)))


def register_ffi_target(name: str, stages: dict[str, Any], platform: str) -> None:
    """Register the handlers of a target, by stage."""
    jax.ffi.register_ffi_target(name, stages, platform=_xla_platform(platform))


def register_ffi_type(name: str, capsules: Any, platform: str) -> None:
    """Register the type of a handler's state, by its parts."""
    jax.ffi.register_ffi_type(name, capsules, platform=_xla_platform(platform))
