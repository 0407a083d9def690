"""Statistics that are not those of the exported program."""

import pytest

from jaxtap_testkit.odml_samples import W8A8, W8A16
from jaxtap_testkit.odml_statistics import PARAMS, X, stats_of_two, two, without
from provider_odml import ManifestError, OdmlRule, export, qat

pytestmark = pytest.mark.sample(2)


@pytest.mark.parametrize(
    ("fn", "rules", "names"),
    [
        (two(first="encoder"), (W8A8,), ["- enc/dot_general:0", "+ encoder/dot_general:0"]),
        (two(extra=True), (W8A8,), ["+ add:0"]),
        (two(), (W8A16,), ["~ enc/dot_general:0"]),
        (two(), (OdmlRule(module_path="dec"), W8A8), ["- dec/dot_general:0"]),
    ],
    ids=["renamed", "more", "int16", "fewer"],
)
def test_export_shows_how_they_differ(fn, rules, names):
    """Before anything is converted."""
    with pytest.raises(ManifestError) as error:
        export(fn, PARAMS, stats_of_two(), rules, X)
    for name in names:
        assert name in str(error.value)


def test_export_of_a_program_with_a_missing_statistic():
    stats = without(stats_of_two(), "enc/dot_general:0")
    with pytest.raises(ManifestError, match=r"\+ enc/dot_general:0"):
        export(two(), PARAMS, stats, W8A8, X)


def test_export_without_statistics():
    with pytest.raises(ManifestError, match="calibrate"):
        export(two(), PARAMS, None, W8A8, X)


def test_export_of_statistics_that_have_seen_nothing():
    stats = qat(two(), W8A8).init(PARAMS, X)
    with pytest.raises(ManifestError, match=r"must have seen.*enc/dot_general:0"):
        export(two(), PARAMS, stats, W8A8, X)
