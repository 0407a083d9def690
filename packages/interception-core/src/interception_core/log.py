"""Logging: the logger `jaxtap` and those below it.

Nothing is printed unless a program configures `logging`. With `JAXTAP_DEBUG=1` all logs go to
stderr.
"""

import logging
import os
from collections.abc import Mapping

DEBUG = "JAXTAP_DEBUG"


def logger(part: str) -> logging.Logger:
    """Return the logger of a part of jaxtap, such as `jaxtap.plugins`.

    Args:
        part: the name below `jaxtap`. Packages with a plugin take the plugin's name.
    """
    return logging.getLogger(f"jaxtap.{part}")


def is_debug(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether `JAXTAP_DEBUG` asks for logs and tracebacks."""
    return environ.get(DEBUG, "") not in ("", "0")


def log_to_stderr() -> None:
    """Print all logs of jaxtap to stderr. A second call does nothing."""
    root = logging.getLogger("jaxtap")
    if root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(relativeCreated)6d ms %(name)s: %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)


if is_debug():
    log_to_stderr()
