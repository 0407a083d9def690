"""Start Python in a new process, for tests whose subject needs one."""

import os
import subprocess
import sys

from . import compat


def run_python(*words, strict=True, check=True, timeout=600, cwd=None, **environment):
    """Run Python on the CPU. Return the completed process.

    It compiles cheaply, as tests in this process do.

    Args:
        words: What follows ``python``: ``"-c", code``, ``"-m", module``, a file and its arguments.
        strict: Whether warnings are errors there, too.
        check: Whether an exit status other than 0 fails the test, with what the process printed.
        timeout: In seconds.
        cwd: The folder that it starts in.
        environment: Variables that are set for it; one that is None is taken away.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} {compat.FLAGS}"
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **environment}
    done = subprocess.run(
        [sys.executable, *(["-W", "error"] if strict else []), *map(str, words)],
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
    )
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done
