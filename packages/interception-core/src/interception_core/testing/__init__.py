"""Test suites for engines, kernels, providers and plugins.

Needs pytest and Hypothesis (``interception-core[testing]``). interception_core itself never
imports this package.
"""

import pytest

# The suites' asserts explain themselves as those of any test module do.
pytest.register_assert_rewrite(
    f"{__name__}.engine_suite", f"{__name__}.kernel_suite", f"{__name__}.provider_suite"
)

from .engine_suite import EngineConformance  # noqa: E402
from .kernel_suite import KernelConformance  # noqa: E402
from .models import Model, models  # noqa: E402
from .plugins import installed_plugins  # noqa: E402
from .programs import Program, programs  # noqa: E402
from .provider_suite import ProviderConformance  # noqa: E402

__all__ = [
    "EngineConformance",
    "KernelConformance",
    "Model",
    "Program",
    "ProviderConformance",
    "installed_plugins",
    "models",
    "programs",
]
