"""hijax-trace: high-level JAX types, Box, and an engine that taps jitted programs.

Importing this package does not import jax. Each name is imported when it is first used.
"""

from importlib.metadata import version

from interception_core import lazy_exports

__version__ = version("hijax-trace")
__getattr__, __dir__, __all__ = lazy_exports(__name__)
