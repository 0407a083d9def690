"""CPU seconds: what each test costs, and what a package's tests may cost together.

The clock tells what else a machine does. CPU seconds are those of the process of the tests, all its
threads and the processes that it waited for. Every run prints them.

Another processor, or neighbors that share its caches, make all of them more, up to twice. So each
process also times one small piece of work, again and again among the tests: its *pace* is how long
that takes, and budgets are multiplied by it.

``pytest --cpu-file FILE`` writes those of each test, and ``python -m jaxtap_testkit.budget FILE``
judges a run of the default tier: it names the tests over 5 CPU seconds and the packages over their
budget, and fails where one takes one and a half times its budget.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

BUDGETS = {
    "hijax-trace": 65,
    "interception-core": 30,
    "jaxtap": 12,
    "jaxtap-llm": 60,
    "provider-odml": 30,
    "provider-odml-aeq": 15,
    "provider-odml-export": 65,
    "provider-xla": 86,
    "provider-xla-cache": 16,
    "provider-xla-formats": 12,
    "provider-xla-fused": 10,
    "provider-xla-lora": 18,
    "provider-xla-models": 30,
    "provider-xla-passes": 28,
    "provider-xla-report": 13,
    "provider-xla-serve": 7,
    "quant-numerics": 45,
    "quant-optim": 20,
    "te-ffi-kernels": 100,
    "te-ffi-kernels-cuda13": 5,
    "tests": 115,
}
"""CPU seconds for the default tier of each package's tests; ``tests`` are those of several.

Two cores of an AMD EPYC (Zen 3) took 840 in a fresh clone with other work beside them, and 500
without, with what it takes to start. The aim is 600 and less: lower them with each package whose
tests become cheaper.
"""

MOST = 5.0
"""CPU seconds above which a test of the default tier is named."""


def used() -> float:
    """Return the CPU seconds of this process and of those that it waited for."""
    return sum(os.times()[:4])


SOURCE = inspect.getsource(argparse)
USUAL = 0.0188
"""CPU seconds of :func:`one_piece` on the machine that the budgets are from."""

EVERY = 100
"""After how many reports of tests, of which each test has three, a process times it."""


def one_piece() -> float:
    """Return what Python takes to compile a module, in CPU seconds.

    It chases pointers and allocates, as tracing and XLA's passes do, which take the tests' time.
    """
    start = time.thread_time()
    compile(SOURCE, "argparse.py", "exec")
    return time.thread_time() - start


def package_of(nodeid: str) -> str:
    """Return the package that a test belongs to; ``tests`` for those of several."""
    first, _, rest = nodeid.partition("::")[0].partition("/")
    return rest.partition("/")[0] if first == "packages" else first


class Recorder:
    """Counts CPU seconds where tests run, and adds them up where they are reported."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._before = used()
        self._reports = 0
        self.tests: Counter[str] = Counter()
        self.starting = 0.0
        self._pieces: list[float] = []

    @property
    def pace(self) -> float:
        """How long this machine takes for what takes 1 where the budgets are from."""
        return fmean(self._pieces or [USUAL]) / USUAL

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Any:
        """Note what a step of a test took, with what pytest did since the last one."""
        report = yield
        now = used()
        report.cpu = now - self._before  # xdist sends all attributes of a report
        if self._reports % EVERY == 0:
            report.piece = one_piece()
        self._reports += 1
        self._before = used()
        return report

    def pytest_collection_finish(self) -> None:
        """Count imports and collection as no test's."""
        now = used()
        self.starting = now - self._before
        self._before = now
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["starting"] = self.starting

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a worker took to start."""
        self.starting += getattr(node, "workeroutput", {}).get("starting", 0.0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add a step of a test."""
        self.tests[report.nodeid] += getattr(report, "cpu", 0.0)
        if hasattr(report, "piece"):
            self._pieces.append(report.piece)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the seconds of each package."""
        path = self._config.option.cpu_file
        if path:
            found = {"pace": self.pace, "starting": self.starting, "tests": dict(self.tests)}
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(found, indent=1))
        line = summary(self.starting, self.tests, self._config.option.full, self.pace)
        terminalreporter.write_line(line)


def by_package(tests: dict[str, float]) -> Counter[str]:
    """Return the CPU seconds of each package's tests."""
    found: Counter[str] = Counter()
    for nodeid, seconds in tests.items():
        found[package_of(nodeid)] += seconds
    return found


def summary(starting: float, tests: dict[str, float], full: bool, pace: float) -> str:
    """Return one line on the CPU seconds of a run, with the budgets of the default tier."""
    parts = [
        f"{name} {seconds:.0f}" + ("" if full or name not in BUDGETS else f"/{BUDGETS[name]}")
        for name, seconds in sorted(by_package(tests).items())
    ]
    total = starting + sum(tests.values())
    return (
        f"CPU seconds: {total:.0f} = {starting:.0f} to start, {', '.join(parts)}; pace {pace:.2f}"
    )


def judge(tests: dict[str, float], pace: float) -> tuple[list[str], list[str]]:
    """Return what a run of the default tier shows: remarks, and what must be mended.

    Args:
        tests: CPU seconds by test.
        pace: How long this machine takes for what takes 1 where the budgets are from.
    """
    slow = sorted(tests.items(), key=lambda one: -one[1])
    remarks = [f"{seconds:5.1f} s  {name}" for name, seconds in slow if seconds > MOST * pace]
    wrong = []
    for name, seconds in sorted(by_package(tests).items()):
        budget = BUDGETS.get(name)
        if budget is None:
            wrong.append(f"{name} must have a budget in jaxtap_testkit.budget. Add one.")
            continue
        allowed = budget * pace
        given = f"{allowed:.0f} CPU seconds ({budget} at a pace of {pace:.2f})"
        if seconds > 1.5 * allowed:
            wrong.append(
                f"The default tests of {name} must take {given}, got {seconds:.0f}. "
                "Make them cheaper, or move bulk to the full tier."
            )
        elif seconds > allowed:
            remarks.append(f"{name} is over its budget: {seconds:.0f} of {given}")
    return remarks, wrong


def main(path: str) -> int:
    """Print what a run shows, and return 1 if something must be mended."""
    found = json.loads(Path(path).read_text())
    remarks, wrong = judge(found["tests"], found["pace"])
    print("\n".join([*remarks, *wrong]) or "All tests and packages are within their budgets.")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
