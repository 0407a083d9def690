"""The suite of all engines, for PatchEngine with JIT on and off."""

import pytest

from interception_core import PatchEngine
from interception_core.testing import EngineConformance
from jaxtap_testkit.tiers import count

pytestmark = pytest.mark.sample(2)


class Tiers(EngineConformance):
    """What of the suite is in the full tier alone."""

    @pytest.mark.slow
    def test_two_hundred_concurrent_cold_starts(self):
        super().test_two_hundred_concurrent_cold_starts()

    @pytest.mark.slow
    def test_concurrent_eager_cold_starts(self):
        super().test_concurrent_eager_cold_starts()


class TestPatchEngine(Tiers):
    engine = PatchEngine()
    labels_jit = True
    examples = count(300)


class TestPatchEngineWithoutJit(Tiers):
    engine = PatchEngine(disable_jit=True)
    primitives = True
    disables_jit = True
    examples = count(88)  # the programs are the same ones: four of each form
