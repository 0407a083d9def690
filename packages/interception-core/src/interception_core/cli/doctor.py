"""``jaxtap doctor``: run the checks that plugins declare."""

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

from ..errors import PluginError, one_line
from ..plugins import host as _host
from ..plugins.paths import resolve
from ..plugins.registry import Claim
from ..plugins.specs import CheckResult, DoctorCheck


class Finding(NamedTuple):
    """A check, and what it found."""

    check: DoctorCheck
    results: tuple[CheckResult, ...]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(args: argparse.Namespace) -> int:
    """Run every check and print the results.

    Returns:
        1 when a check fails, 0 otherwise.
    """
    findings = [examine(claim) for claim in _host.loaded().of(DoctorCheck)]
    statuses = [result.status for finding in findings for result in finding.results]
    healthy = "fail" not in statuses
    if args.json:
        print(json.dumps({"ok": healthy, "checks": [*map(_as_json, findings)]}, indent=2))
    else:
        for finding in findings:
            _print(finding)
        counts = [f"{statuses.count(status)} {status}" for status in ("ok", "warn", "fail")]
        print(", ".join(counts))
    return 0 if healthy else 1


def examine(claim: Claim[DoctorCheck]) -> Finding:
    """Run one check. A check that raises fails."""
    try:
        found = resolve(claim.spec.run, claim.label)()
        if not isinstance(found, Iterable):
            raise PluginError(
                f"It must return a list of CheckResult objects, got {found!r}. Return a list."
            )
        results = tuple(found)
        for result in results:
            if not isinstance(result, CheckResult):
                raise PluginError(
                    f"It must return CheckResult objects, got {result!r}. Return no others."
                )
    except (Exception, SystemExit) as error:
        hint = f"the check is broken; it belongs to {claim.owner.label}"
        results = (CheckResult("fail", one_line(error), hint),)
    return Finding(claim.spec, results or (CheckResult("ok", "nothing to report"),))


def _as_json(finding: Finding) -> dict[str, Any]:
    return {
        "name": finding.check.name,
        "summary": finding.check.summary,
        "results": [asdict(result) for result in finding.results],
    }


def _print(finding: Finding) -> None:
    print(f"{finding.check.name}: {finding.check.summary}")
    for result in finding.results:
        print(f"  {result.status:4}  {result.message}")
        if result.hint:
            print(f"        {result.hint}")
