"""StableHLO programs to one .tflite. The converter, which may crash, runs in a subprocess."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConversionError
from .faults import repair
from .io import deduplicate, requantized

WORKER = Path(__file__).with_name("worker.py")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "GLOG_minloglevel": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
NOISE = re.compile(r"^(WARNING: All log messages before|[IW]\d{4} )")


@dataclass(frozen=True)
class Program:
    """What becomes one signature.

    Attributes:
        name: of the signature.
        artifact: the program as a StableHLO portable artifact, such as the
            ``mlir_module_serialized`` of ``jax.export``.
        inputs: a name for each argument of its main function, in order.
        outputs: a name for each result, in order.
    """

    name: str
    artifact: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def convert(programs: Sequence[Program], *, timeout: float = 600.0, strict: bool = True) -> bytes:
    """Convert programs to one .tflite with a signature each. Equal constants are stored once.

    Args:
        programs: at least one, with different names.
        timeout: seconds that the converter may take.
        strict: an operation is done in integers where all its float inputs and outputs have a
            fake quantization, and nowhere else.

    Returns:
        The .tflite.

    Raises:
        ConversionError: the converter failed, crashed or took too long, or names do not fit the
            programs. Its `log` has all that the converter printed.
    """
    _check(programs)
    with tempfile.TemporaryDirectory(prefix="odml-") as name:
        folder = Path(name)
        job = {"strict": strict, "programs": []}
        for number, one in enumerate(programs):
            file = f"{number}.mlirbc"
            (folder / file).write_bytes(one.artifact)
            fields = {"name": one.name, "inputs": one.inputs, "outputs": one.outputs}
            job["programs"].append({"file": file, **fields})
        (folder / "job.json").write_text(json.dumps(job))
        status, log = _run([sys.executable, "-P", str(WORKER), name], timeout)
        error = folder / "error.json"
        if error.exists():
            raise ConversionError(_explain(json.loads(error.read_text()), programs), log)
        model = folder / "model.tflite"
        if status != 0 or not model.exists():
            raise ConversionError(_crash(status, log), log)
        return deduplicate(requantized(repair(model.read_bytes())))


def _check(programs: Sequence[Program]) -> None:
    names = [one.name for one in programs]
    if not names or len(set(names)) != len(names) or not all(names):
        raise ConversionError(f"Signatures must have different names, at least one, got {names}.")
    for one in programs:
        for what, given in (("inputs", one.inputs), ("outputs", one.outputs)):
            if len(set(given)) != len(given) or not all(given):
                raise ConversionError(
                    f"The {what} of signature {one.name!r} must have different, non-empty names, "
                    f"got {list(given)}."
                )


def _run(command: list[str], timeout: float) -> tuple[int, str]:
    """Run a command. Return its exit status and what it printed; nothing of it is left."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **QUIET},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        _kill(process)
        output, _ = process.communicate()
        raise ConversionError(
            f"The converter must end within {timeout:g} s, and was stopped. Give it a longer"
            " timeout, or a smaller program.",
            output.decode(errors="replace"),
        ) from error
    except BaseException:
        _kill(process)
        process.communicate()
        raise
    return process.returncode, output.decode(errors="replace")


def _kill(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def _crash(status: int, log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip() and not NOISE.match(line)]
    last = f": {lines[-1].strip()}" if lines else "."
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"The converter crashed with {name}{last}"
    return f"The converter ended with status {status}{last}"


def _explain(error: dict[str, Any], programs: Sequence[Program]) -> str:
    """Return the message for what the worker said went wrong."""
    stage, name = error["stage"], error.get("program")
    one = next((program for program in programs if program.name == name), None)
    whose = f"signature {name!r}" if name else "the program"
    said = "; ".join(error.get("messages", [])) or error.get("reason") or "it does not say why"
    if stage == "read":
        assert one is not None
        version = artifact_version(one.artifact)
        text = f"The converter can't read {whose}: {said}."
        if version is None:
            return f"{text} The program must be a StableHLO portable artifact."
        text += f" It is of StableHLO {version}, and the converter has {error['converter']}"
        if _numbers(version) > _numbers(error["converter"]):
            return f"{text}: install a newer litert-converter, or an older jax."
        if "'sdy'" in said:
            return (
                f"{text}, which should do. But it has operations with a sharding (the sdy dialect),"
                " as those of sharded arrays and the decompositions in jnp.linalg have."
            )
        return f"{text}, which should do: the artifact is broken."
    if stage == "names":
        assert one is not None
        if "found" not in error:
            return f"{whose}: {said}".capitalize()
        return (
            f"The program of {whose} has {error['found']['inputs']} inputs and"
            f" {error['found']['outputs']} outputs, but the names {list(one.inputs)} and"
            f" {list(one.outputs)} were given."
        )
    if stage == "python":
        return f"The converter failed: {said}"
    left = error.get("left", [])
    if left:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        listed = "; ".join(left[:5])
        return f"TFLite has no operations for these of {whose}: {listed}{more}."
    return f"The converter failed to {stage} {whose}: {said}"


def artifact_version(artifact: bytes) -> str | None:
    """Return the StableHLO version of a portable artifact, or None."""
    found = re.match(rb"ML\xefR.?StableHLO_v(\d+\.\d+\.\d+)\x00", artifact, re.DOTALL)
    return found[1].decode() if found else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
