"""For authors of engines: the suite that every engine passes, and the programs it runs on.

Needs pytest and Hypothesis (``interception-core[testing]``). interception_core itself never
imports this package.
"""

import pytest

# The suite's asserts explain themselves as those of any test module do.
pytest.register_assert_rewrite(f"{__name__}._suite")

from ._suite import EngineConformance  # noqa: E402
from .models import Model, models  # noqa: E402
from .programs import Program, programs  # noqa: E402

__all__ = ["EngineConformance", "Model", "Program", "models", "programs"]
