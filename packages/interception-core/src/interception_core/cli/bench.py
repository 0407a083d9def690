"""``jaxtap bench``: time a kernel beside reference and displaced kernel.

All sides run in turn, round by round, in one process, so that they see the same machine. Times are
lower quartiles, because other programs only add to a time.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..errors import JaxtapError, PluginError, nearest_name
from ..kernels.bench import Bench, BenchCase, Side, write_table
from ..kernels.platforms import platform_of
from ..kernels.select import chosen_kernel
from ..plugins import host as _host
from ..plugins.paths import resolve
from ..plugins.specs import KernelSpec

_LEAST_ROUNDS = 4
_FAR = 8
"""A side that is so many times slower than the kernel is timed twice, not in each round."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("kernel", help="a target such as te_ffi_kernels.gemm_w4a16, or an op")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="LABEL=VALUE",
        help="time the cases with this label; several for one label are alternatives",
    )
    parser.add_argument(
        "--skip", action="append", default=[], metavar="SIDE", help="a side that is not timed"
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="at least, for each case (default: 1)"
    )
    parser.add_argument(
        "--cases", metavar="MODULE:FUNCTION", help="time the cases of this Bench instead"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--write", action="store_true", help="put the ratios into the package's table"
    )


def run(args: argparse.Namespace) -> int:
    """Time a kernel and print the times.

    Raises:
        JaxtapError: the kernel, case or table does not exist, or a needed side is left out.
    """
    spec = _kernel(args.kernel)
    bench = bench_of(spec, args.cases)
    wanted = _wanted(args.only)
    if args.write and bench.table is None:
        raise JaxtapError(
            f"The kernel must have a table for --write, got {spec.target}, which has none. Leave "
            "out --write."
        )
    if {"kernel", bench.against} & {*args.skip}:
        raise JaxtapError(
            f"--skip must leave the sides kernel and {bench.against}, got {args.skip}. Leave "
            "out that side."
        )
    found: list[dict[str, Any]] = []
    for case in bench.cases:
        if not all(str(case.labels.get(name)) in values for name, values in wanted.items()):
            continue
        found.append(_timed(spec, case, args.seconds, args.skip))
        if not args.json:
            print(_line(found, bench.against), flush=True)
    if not found:
        raise JaxtapError(
            f"--only must select cases, got {args.only}, and no case of {spec.target} has these "
            "labels. Leave some out."
        )
    if args.json:
        ours = {"kernel": spec.target, "platform": spec.platform, "variant": bench.variant}
        print(json.dumps({**ours, "against": bench.against, "cases": found}, indent=2))
    if args.write and bench.table is not None:
        rows = [{**one["labels"], "ratio": round(_ratio(one, bench.against), 3)} for one in found]
        write_table(bench.table, spec.target, bench.variant, rows)
    return 0


def _kernel(name: str) -> KernelSpec:
    platform = platform_of()
    here = [spec for spec in _host.declared_specs(KernelSpec) if spec.platform == platform]
    fit = [spec for spec in here if name in (spec.target, spec.op)]
    if not fit:
        near = nearest_name(name, [part for spec in here for part in (spec.target, spec.op)])
        hint = f"Did you mean {near!r}?" if near else "Run jaxtap ops to list them."
        raise JaxtapError(
            f"The kernel must be the target or op of a kernel for {platform}, got {name!r}. {hint}"
        )
    return max(fit, key=lambda spec: spec.priority)


def bench_of(spec: KernelSpec, given: str | None = None) -> Bench:
    """Return the calls that a kernel declares, or those of ``"module:function"``.

    Args:
        given: the path of a function to use instead of the kernel's.

    Raises:
        JaxtapError: the kernel declares no calls.
        PluginError: the function can't be loaded, or does not return a `Bench`.
    """
    path = spec.bench if given is None else given
    if path is None:
        raise JaxtapError(
            f"A kernel must declare cases to be timed, got {spec.target}, which declares none. "
            "Declare KernelSpec(bench=...), or give --cases MODULE:FUNCTION."
        )
    bench = resolve(path, f"the kernel {spec.key!r}")(spec)
    if not isinstance(bench, Bench):
        raise PluginError(
            f"{path!r} must return a Bench, got {bench!r}. Return interception_core.Bench(cases)."
        )
    return bench


def _wanted(only: list[str]) -> dict[str, list[str]]:
    wanted: dict[str, list[str]] = {}
    for one in only:
        name, equals, value = one.partition("=")
        if not equals:
            raise JaxtapError(
                f"--only must be LABEL=VALUE, got {one!r}. Write for example --only rows=8."
            )
        wanted.setdefault(name, []).append(value)
    return wanted


def _timed(
    spec: KernelSpec, case: BenchCase, seconds: float, skip: Sequence[str]
) -> dict[str, Any]:
    """Time all sides of a case in turn.

    Returns:
        The labels, the lower quartile of each side in seconds, and the number of rounds.
    """
    runs = {side: _compiled(spec, *what()) for side, what in _sides(spec, case) if side not in skip}
    first = {side: min(_seconds(call) for _ in range(2)) for side, call in runs.items()}
    # A side that is far slower is not timed often.
    quick = [side for side in runs if first[side] < _FAR * first["kernel"]]
    times: dict[str, list[float]] = {side: [] for side in quick}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < _LEAST_ROUNDS or time.perf_counter() < end:
        rounds += 1
        for side in quick:
            times[side].append(_seconds(runs[side]))
    quartiles = {
        side: sorted(times[side])[rounds // 4] if side in times else first[side] for side in runs
    }
    return {"labels": dict(case.labels), "seconds": quartiles, "rounds": rounds}


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _sides(
    spec: KernelSpec, case: BenchCase
) -> Iterator[tuple[str, Callable[[], tuple[KernelSpec | None, Side]]]]:
    """Yield each side's name, and what makes its kernel and call."""
    op = functools.cache(case.make)
    rivals = [
        other
        for other in _host.declared_specs(KernelSpec)
        if (other.op, other.platform) == (spec.op, spec.platform) and other != spec
    ]
    first = max(rivals, key=lambda other: other.priority, default=None)
    for name, kernel in (
        ("kernel", spec),
        *([] if first is None else [(first.target, first)]),
        ("reference", None),
    ):
        yield name, lambda kernel=kernel: (kernel, op())
    for name, make in case.others.items():
        yield name, lambda make=make: (None, make())


def _compiled(spec: KernelSpec, kernel: KernelSpec | None, side: Side) -> Callable[[], Any]:
    """Return a call that waits for its result, with one kernel."""
    import jax

    fn, operands = side
    # Programs that were traced before keep their kernel.
    jax.clear_caches()
    with chosen_kernel(spec.op, spec.platform, kernel):
        compiled = jax.jit(lambda *given: fn(*given)).lower(*operands).compile()
    return lambda: jax.block_until_ready(compiled(*operands))


def _ratio(found: dict[str, Any], against: str) -> float:
    if against not in found["seconds"]:
        raise PluginError(
            f"Bench.against must be a side, got {against!r}. Name one of "
            f"{', '.join(found['seconds'])}."
        )
    return found["seconds"]["kernel"] / found["seconds"][against]


def _line(found: list[dict[str, Any]], against: str) -> str:
    """Return the table's line of the last case."""
    labels, seconds = found[-1]["labels"], found[-1]["seconds"]
    sides = [f"{side} ms" for side in seconds]
    head = [*labels, *sides, *(f"kernel/{side}" for side in seconds if side != "kernel")]
    ratios = [f"{_ratio(found[-1], side):.2f}" for side in seconds if side != "kernel"]
    cells = [*map(str, labels.values()), *(f"{1e3 * t:.3f}" for t in seconds.values()), *ratios]
    slower = "  slower" if _ratio(found[-1], against) > 1 else ""
    widths = [max(len(name), 8) for name in head]

    def row(cells: list[str]) -> str:
        pairs = zip(cells, widths, strict=True)
        return "  ".join(cell.rjust(width) for cell, width in pairs)

    return f"{row(head)}\n{row(cells)}{slower}" if len(found) == 1 else f"{row(cells)}{slower}"
