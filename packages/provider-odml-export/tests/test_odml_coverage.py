"""The models of Qwix's coverage test, each exported alone."""

import pytest

from jaxtap_testkit.odml_coverage import CASES, result

MORE = {"GroupNormSilu, static": 20}
"""Operations in float. Qwix counts one: its converter's group norm, which LiteRT lacks."""
CUT_OFF = "UNet, static"
"""Its inputs and outputs have the ranges 0 to 1, and values beyond."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_model_is_exported_as_it_was_trained(name):
    case = CASES[name]
    found = result(case)
    assert found.lsb is None or found.lsb <= 1.01
    assert found.trained > 35
    assert found.exact > (10 if name == CUT_OFF else 35)
    for kind in ("quantize", "dequantize"):
        assert found.counts[kind] <= case.expected.get(kind, found.counts[kind])
    if "float" in case.expected:
        assert found.counts["float"] <= MORE.get(name, case.expected["float"])
    if "integer" in case.expected:
        assert found.counts["integer"] == case.expected["integer"]
