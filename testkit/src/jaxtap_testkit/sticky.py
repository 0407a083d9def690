"""A pytest plugin for tests on a GPU: results as they come, and workers that end on sticky errors.

After an illegal address or another error that CUDA calls sticky, each call of the process fails: a
worker of pytest-xdist that meets one ends, and another takes its tests. Without this, one fault
fails all tests that come after it.

``JAXTAP_RESULTS`` in the environment names a file, to which a line of JSON is added for each test
that has ended: a run that is stopped has these.
"""

import json
import os

import pytest

STICKY = (
    "illegal address",
    "illegal memory access",
    "ILLEGAL_ADDRESS",
    "misaligned address",
    "MISALIGNED_ADDRESS",
    "unspecified launch failure",
    "CUDA_ERROR_LAUNCH_FAILED",
    "illegal instruction",
    "ILLEGAL_INSTRUCTION",
    "device-side assert",
    "CUDA_ERROR_ASSERT",
    "HARDWARE_STACK_ERROR",
)


def is_sticky(message):
    """Tell whether a process can do nothing more on its GPU after this error."""
    return any(text in message for text in STICKY)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.excinfo is not None and "PYTEST_XDIST_WORKER" in os.environ:
        message = str(call.excinfo.value)
        if is_sticky(message):
            # Past pytest's capture: the worker has no other way to say it.
            os.write(2, f"\nsticky CUDA error in {item.nodeid}: {message[:2000]}\n".encode())
            os._exit(3)
    return report


def pytest_runtest_logreport(report):
    path = os.environ.get("JAXTAP_RESULTS")
    if path is None or "PYTEST_XDIST_WORKER" in os.environ:
        return
    # A test has up to three reports: its call's, or of set-up and tear-down what isn't a pass.
    if report.when in ("call", "???") or report.outcome != "passed":
        why = str(report.longrepr)[-2000:] if report.outcome == "failed" else ""
        line = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
        }
        with open(path, "a") as file:
            file.write(json.dumps(line | {"why": why}) + "\n")
