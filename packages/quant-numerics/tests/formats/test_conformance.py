"""Our own formats pass the tests that third parties' formats do."""

import pytest

import quant_numerics as qn
from quant_numerics.testing import FormatConformance

# Relative errors of normally distributed values; more for fewer bits.
TOLERANCE = {2: 0.9, 3: 0.4, 4: 0.2, 5: 0.1, 6: 0.06, 7: 0.04, 8: 0.07, 16: 1e-4}


@pytest.mark.sample(5)
class TestOurs(FormatConformance):
    @pytest.fixture(autouse=True, params=sorted(qn.QTYPES))
    def _each(self, request):
        self.qtype = request.param
        self.tolerance = TOLERANCE[qn.get_qtype(request.param).bits]
