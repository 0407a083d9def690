"""The suite of all engines, for PatchEngine with JIT on and off."""

import pytest

from interception_core import PatchEngine
from interception_core.testing import EngineConformance

pytestmark = pytest.mark.sample(3)


class TestPatchEngine(EngineConformance):
    engine = PatchEngine()
    labels_jit = True


class TestPatchEngineWithoutJit(EngineConformance):
    engine = PatchEngine(disable_jit=True)
    primitives = True
    disables_jit = True
    examples = 88  # the programs are the same ones: four of each form
