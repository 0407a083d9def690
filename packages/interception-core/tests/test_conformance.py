"""The suite of all engines, for PatchEngine with JIT on and off."""

import pytest

from interception_core import PatchEngine
from jaxtap_testkit.conformance import ConformanceWithFlags, TieredConformance
from jaxtap_testkit.tiers import count

pytestmark = pytest.mark.sample(2)


class TestPatchEngine(TieredConformance):
    engine = PatchEngine()
    labels_jit = True
    examples = count(110)


class TestPatchEngineWithoutJit(TieredConformance):
    engine = PatchEngine(disable_jit=True)
    primitives = True
    disables_jit = True
    examples = count(44)  # the programs are the same ones: two of each form


class TestPatchEngineWithFlags(ConformanceWithFlags):
    engine = PatchEngine()
    labels_jit = True
    examples = count(44)


class TestPatchEngineWithoutJitWithFlags(ConformanceWithFlags):
    engine = PatchEngine(disable_jit=True)
    primitives = True
    disables_jit = True
    examples = count(22)
