"""The suite of all engines, for TraceEngine."""

import pytest

from hijax_trace import TraceEngine
from interception_core.testing import EngineConformance
from jaxtap_testkit.tiers import count

pytestmark = pytest.mark.sample(2)


class TestTraceEngine(EngineConformance):
    engine = TraceEngine()
    primitives = True
    # A gradient around a tap around another gradient may sum in another order: some 2 of 300.
    reorders_sums = True
    examples = count(300)

    @pytest.mark.slow
    def test_two_hundred_concurrent_cold_starts(self):
        super().test_two_hundred_concurrent_cold_starts()

    @pytest.mark.slow
    def test_concurrent_eager_cold_starts(self):
        super().test_concurrent_eager_cold_starts()
