"""The only place of interception-core that touches private JAX, or depends on its version.

Each name says for which versions it holds; all were checked on 0.10.2, 0.11.2 and 0.12.0.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
import jaxlib
from jax._src import ad_checkpoint as _ad_checkpoint  # 0.10.2 - 0.12
from jax._src import api as _api  # 0.10.2 - 0.12
from jax._src import core as _core  # 0.10.2 - 0.12
from jax._src import hijax as _hijax  # 0.10.2 - 0.12
from jax._src import pjit as _pjit  # 0.10.2 - 0.12
from jax._src import shard_map as _shard_map  # 0.10.2 - 0.12
from jax._src import source_info_util as _source_info  # 0.10.2 - 0.12
from jax._src.interpreters import ad as _ad  # 0.10.2 - 0.12
from jax._src.interpreters import batching as _batching  # 0.10.2 - 0.12
from jax._src.interpreters import mlir as _mlir  # 0.10.2 - 0.12
from jax._src.interpreters import partial_eval as _pe  # 0.10.2 - 0.12
from jax._src.interpreters import remat as _remat  # 0.10.2 - 0.12
from jax._src.lax.control_flow import loops as _loops  # 0.10.2 - 0.12
from jax.extend import source_info_util
from jax.extend.core import primitives as _public_primitives
from jaxlib import xla_client as _xla_client  # 0.10.2 - 0.12

# Operations have the source line of the program, not that of the tap.
source_info_util.register_exclusion(str(Path(__file__).parent))

PjitFunction: type = type(jax.jit(lambda: None))
"""The C++ type of every jitted function, 0.10.2 - 0.12."""

NameScope: type = type(jax.named_scope(""))
"""What ``jax.named_scope`` returns: a Python class with plain enter and exit, 0.10.2 - 0.12.

JAX's own decorators and flax's and equinox's module calls all go through it.
"""

lower_jaxpr_to_module: FunctionType = _mlir.lower_jaxpr_to_module
"""Runs all lowering rules, 0.10.2 - 0.12.

Rules made by ``mlir.lower_fun`` trace ordinary lax functions, which are no operations of the
program and must not be tapped.
"""

rule_runners: tuple[FunctionType, ...] = (
    _ad.JVPTrace.process_primitive,
    _ad.LinearizeTrace.process_primitive,
    _batching.BatchTrace.process_primitive,
    _remat.RematTrace.process_primitive,
    _shard_map.ShardMapTrace.process_primitive,
)
"""Run the rules of primitives (derivative, batching, ...), 0.10.2 - 0.12.

Called with the trace, the primitive, its operands and its parameters. Those rules call lax
functions too. No code of the program runs below them, except the rules of ``custom_vjp``,
``custom_jvp`` and ``custom_vmap``.
"""

backward_pass: FunctionType = _ad.backward_pass3
"""Runs the transpose rules, 0.10.2 - 0.12. As ``rule_runners``."""

evaluate_partially: FunctionType = _pe.JaxprTrace.process_primitive
"""Computes a primitive of known operands and traces one of unknown operands, 0.10.2 - 0.12.

As ``rule_runners``.
"""

hoist: FunctionType = _loops._scan_known_hoisting
trace_partially: FunctionType = _pe.trace_to_jaxpr_nounits
"""Computes before a differentiated loop what doesn't change in it, 0.10.2 - 0.12.

The first forgets all name scopes, and calls the second.
"""

eval_shape: FunctionType = _api.eval_shape
linear_transpose: FunctionType = _api.linear_transpose
"""0.10.2 - 0.12. Public as ``jax.eval_shape`` and ``jax.linear_transpose``."""

evaluate_checkpoint: FunctionType = _ad_checkpoint.remat_impl
"""Binds what ``jax.checkpoint`` has traced once more where nothing else is to be traced,
0.10.2 - 0.12. It was tapped when it was traced."""

jit_staging_rule: FunctionType = _pjit.pjit_staging_rule
"""Puts the call of a jitted function into a jaxpr, or its body in its place, 0.10.2 - 0.12.

Called with the trace, the source line and the operands; the parameters are keywords.
"""


def keep_call(trace: Any, source_info: Any, *operands: Any, **params: Any) -> Any:
    """Puts the call itself into the jaxpr, however early it wants to be inlined."""
    return trace.default_process_primitive(_pjit.jit_p, operands, params, source_info=source_info)


SETTLED = "jaxtap.settled"
"""Begins the name scope of operations that are none of the program's, where an observer looks
on: what a rule or a handler adds to the program."""


def settled(name: str = SETTLED) -> Any:
    """Returns a context manager: operations made in it are none of the program's."""
    # Not extend_name_stack: that would be a part of the module path.
    return _source_info.set_name_stack(_source_info.current_name_stack().extend(name))


def is_settled() -> bool:
    """Returns whether operations made now are none of the program's."""
    stack = _source_info.current_name_stack().stack
    return any(entry.name.startswith(SETTLED) for entry in stack)


def unsettled() -> Any:
    """Returns a context manager: operations made in it are the program's again."""
    stack = _source_info.current_name_stack()
    kept = tuple(entry for entry in stack.stack if not entry.name.startswith(SETTLED))
    return _source_info.set_name_stack(_source_info.NameStack(kept))


AHEAD = "jaxtap.ahead"
"""Names the scope of operations that a program computes while it traces a function ahead."""

TRANSPOSED = "jaxtap.transposed"
"""Names the scope in which ``jax.linear_transpose`` traces a function."""


def _is_ahead(trace: Any) -> bool:
    """Returns whether the program evaluates a function partially, ahead of running it.

    Rules of JAX, and transposes, evaluate partially what is not run a second time.
    """
    if not isinstance(trace, _pe.JaxprTrace):
        return False
    names = [entry.name for entry in trace.name_stack.stack]
    return not any(name.startswith((SETTLED, TRANSPOSED)) for name in names)


def unknown_ahead(value: Any) -> bool:
    """Returns whether a value is unknown where the program evaluates a function partially.

    An operation of it is only traced: if the program runs it, it does so later.
    """
    while isinstance(value, _core.Tracer):
        if isinstance(value, _pe.JaxprTracer):
            return _is_ahead(value._trace) and not value.is_known()
        if isinstance(value, _ad.JVPTracer | _ad.LinearizeTracer):
            value = value.primal
        elif isinstance(value, _batching.BatchTracer):
            value = value.val
        else:
            return False
    return False


def known_ahead(trace: Any, values: Any) -> list[Any] | None:
    """Returns the operands of what is computed while a function is evaluated partially.

    None for any other trace, and where an operand is unknown.
    """
    if not _is_ahead(trace):
        return None
    found = [
        value.pval.get_known()
        if isinstance(value, _pe.JaxprTracer) and value._trace is trace
        else value
        for value in values
    ]
    return None if any(value is None or unknown_ahead(value) for value in found) else found


def around(trace: Any) -> Any:
    """Returns a context manager: operations are computed outside of such a trace."""
    return _core.set_current_trace(trace.parent_trace)


Primitive: type = _core.Primitive


def traced_function(fn: Any) -> Any:
    """Returns the Python function that a ``PjitFunction`` traces (0.10.2 - 0.12)."""
    return fn._fun


def staging_trace() -> Any | None:
    """Returns the innermost trace that builds a jaxpr, or None outside of any.

    Traces of ``grad``, ``vmap`` and ``jvp`` are looked through: they evaluate in place.
    """
    trace = _core.trace_ctx.trace
    while trace is not None and not hasattr(trace, "frame"):
        trace = getattr(trace, "parent_trace", None)
    return trace


def trace_label(trace: Any) -> str:
    """Returns what a staging trace traces, as ``jit(block)`` or ``scan(body)``."""
    info = trace.frame.debug_info
    if info is None:
        return "trace"
    return f"{info.traced_for.split(' ')[0]}({info.func_name})".replace("/", ".")


def primitives() -> dict[str, Any]:
    """Returns every primitive that JAX exposes or that has a lowering rule, by name.

    The lowering tables (0.10.2 - 0.12) also hold the primitives of other libraries.
    """
    tables = [_mlir._lowerings, *_mlir._platform_specific_lowerings.values()]
    lowered = [primitive for table in tables for primitive in table]
    public = [p for p in vars(_public_primitives).values() if isinstance(p, Primitive)]
    # Made of other operations before it is lowered: it has no rule there.
    high = [_hijax.call_hi_primitive_p]
    return {primitive.name: primitive for primitive in (*lowered, *public, *high)}


jaxlib_version: str = jaxlib.__version__


def start_backend(platform: str) -> None:
    """Starts the backend of a platform, if it is not running. Raises where it cannot start."""
    jax.devices(platform)


@cache
def ffi_api_version() -> tuple[int, int] | None:
    """Returns the newest version of XLA's FFI that this jaxlib runs, as (major, minor).

    Nothing in jaxlib's Python tells. The headers that it ships are those it was built with
    (0.10.2: 0.3, 0.11.2: 0.4, 0.12: 0.5). None where a distributor has left them out: XLA, which
    looks at the handler itself, then is the only one to check.
    """
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    if not header.is_file():
        return None
    text = header.read_text(encoding="utf-8")
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    major, minor = (int(match[1]) if match else None for match in found)
    return None if major is None or minor is None else (major, minor)


def _xla_platform(platform: str) -> str:
    # The registry of targets knows platforms by these names, those of JAX's own kernels too.
    return {"cpu": "cpu", "cuda": "CUDA", "rocm": "ROCM"}.get(platform, platform)


def ffi_targets(platform: str) -> set[str]:
    """Returns the names of the targets that XLA has for a platform, whoever registered them.

    What waits for the backend to start is not among them (0.10.2 - 0.12).
    """
    name = _xla_platform(platform)
    return set(_xla_client.custom_call_targets(_xla_client.xla_platform_names.get(name, name)))


def register_ffi_target(name: str, stages: dict[str, Any], platform: str) -> None:
    """Registers the handlers of a target, by stage."""
    jax.ffi.register_ffi_target(name, stages, platform=_xla_platform(platform))


def register_ffi_type(name: str, capsules: Any, platform: str) -> None:
    """Registers the type of the state that handlers keep, by its parts."""
    jax.ffi.register_ffi_type(name, capsules, platform=_xla_platform(platform))
