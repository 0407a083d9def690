"""``jaxtap ops``: print the ops that have kernels, and their calls.

A call is read from a program: for each dtype, the first of the calls that ``jaxtap bench`` times. A
kernel of another package that implements the op gets the same call.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from ..errors import JaxtapError, nearest_name
from ..kernels.bench import BenchCase
from ..kernels.platforms import platform_of
from ..kernels.select import chosen_kernel
from ..plugins import host as _host
from ..plugins.specs import KernelSpec
from .bench import bench_of


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("ops", nargs="*", metavar="OP", help="such as gemm_w8a8 (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the ops.

    Raises:
        JaxtapError: no kernel implements an op.
    """
    kernels: dict[str, list[KernelSpec]] = {}
    for spec in sorted(_host.declared_specs(KernelSpec), key=lambda spec: -spec.priority):
        kernels.setdefault(spec.op, []).append(spec)
    for op in args.ops:
        if op not in kernels:
            near = nearest_name(op, kernels)
            hint = f"Did you mean {near!r}?" if near else "Run jaxtap ops to list all."
            raise JaxtapError(f"OP must be an op that a kernel implements, got {op!r}. {hint}")
    found = [_described(op, kernels[op]) for op in sorted(args.ops or kernels)]
    print(json.dumps(found, indent=2) if args.json else "\n\n".join(map(_text, found)))
    return 0


def _described(op: str, specs: list[KernelSpec]) -> dict[str, Any]:
    platform = platform_of()
    here = [spec for spec in specs if spec.platform == platform and spec.bench is not None]
    calls = list(_calls(here[0])) if here else []
    kernels = [{"target": spec.target, "platform": spec.platform} for spec in specs]
    return {"op": op, "summary": specs[0].summary, "kernels": kernels, "calls": calls}


def _calls(spec: KernelSpec) -> Iterator[dict[str, Any]]:
    seen: set[Any] = set()
    for case in bench_of(spec).cases:
        dtype = case.labels.get("dtype")
        if dtype not in seen:
            seen.add(dtype)
            yield {"labels": dict(case.labels), **_call(spec, case)}


def _call(spec: KernelSpec, case: BenchCase) -> dict[str, Any]:
    """Return the operands, results and attributes that a kernel is called with."""
    import jax

    fn, operands = case.make()
    # Programs that were traced before keep their kernel.
    jax.clear_caches()
    with chosen_kernel(spec.op, spec.platform, spec):
        program = jax.make_jaxpr(lambda *given: fn(*given))(*operands)
    for eqn in _equations(program.jaxpr):
        if eqn.primitive.name == "ffi_call" and eqn.params["target_name"] == spec.target:
            return {
                "operands": [var.aval.str_short() for var in eqn.invars],
                "results": [var.aval.str_short() for var in eqn.outvars],
                "attributes": _type(dict(eqn.params["attributes"])),
            }
    raise JaxtapError(
        f"The first call that {spec.bench} returns must run {spec.target}, got {case.labels} "
        "without it. Return a call that its supports takes."
    )


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


def _type(value: Any) -> Any:
    """Return the type of an attribute, as a kernel sees it."""
    if hasattr(value, "items"):
        return {name: _type(one) for name, one in value.items()}
    name = type(value).__name__
    return str(getattr(value, "dtype", {"int": "int64", "float": "float64"}.get(name, name)))


def _text(found: dict[str, Any]) -> str:
    lines = [f"{found['op']}: {found['summary']}"]
    lines += [f"  kernel      {one['target']} ({one['platform']})" for one in found["kernels"]]
    for call in found["calls"]:
        lines.append(f"  call        {', '.join(f'{k}={v}' for k, v in call['labels'].items())}")
        lines.append(f"    operands    {', '.join(call['operands'])}")
        lines.append(f"    results     {', '.join(call['results'])}")
        lines.append(f"    attributes  {_pairs(call['attributes']) or 'none'}")
    return "\n".join(lines)


def _pairs(attributes: dict[str, Any]) -> str:
    texts = {
        name: kind if isinstance(kind, str) else f"{{{_pairs(kind)}}}"
        for name, kind in attributes.items()
    }
    return ", ".join(f"{name}: {text}" for name, text in texts.items())
