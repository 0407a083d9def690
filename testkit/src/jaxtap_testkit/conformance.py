"""The suite of all engines, in two tiers."""

import pytest

from interception_core.testing import EngineConformance


class TieredConformance(EngineConformance):
    """What of the suite is in the full tier alone."""

    @pytest.mark.slow
    def test_two_hundred_concurrent_cold_starts(self):
        super().test_two_hundred_concurrent_cold_starts()

    @pytest.mark.slow
    def test_concurrent_eager_cold_starts(self):
        super().test_concurrent_eager_cold_starts()
