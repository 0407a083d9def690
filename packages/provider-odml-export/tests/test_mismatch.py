"""Verification where the file and the one with all sites as outputs differ, and what it says."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import provider_odml as odml
from jaxtap_testkit.odml_exports import exported, normal
from provider_odml_export.exporting import export, verify
from provider_odml_export.exporting.mismatch import check_outputs
from provider_odml_export.exporting.verify import OutputResult

PLAIN = OutputResult("main", "y", 0.01, 40.0, True, math.inf)
APART = dataclasses.replace(PLAIN, same=False, difference=0.5, step=0.25)
FIRST = "sum:0 (sum, int8), by 1.0 steps of 0.125"


def masked_mean(params, x, mask):
    """The mask is quantized for two readers: the file adds it in integers, the other in floats."""
    weights = mask[..., None].astype(x.dtype)
    return (x @ params * weights).sum(1) / jnp.maximum(weights.sum(1), 1)


def case():
    # 16 of 32 ones are 127.5 steps: the two files round them to different sides.
    lengths = np.array([32, 16, 5, 9])
    return normal(8, 8), normal(4, 32, 8, seed=1), np.arange(32) < lengths[:, None]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (dataclasses.replace(APART, first=FIRST), f"2.0 steps of 0.25 away.*differs is {FIRST}.*"),
        (APART, "2.0 steps of 0.25 away. No tensor before it differs"),
        (dataclasses.replace(APART, step=None), "got values 0.5 away"),
        (dataclasses.replace(PLAIN, error=math.nan), "must be finite, got NaN"),
        (
            dataclasses.replace(PLAIN, error=0.2, tolerance=0.1),
            r"must be within 10.00% of JAX, got 20.00% of its greatest magnitude",
        ),
        (
            dataclasses.replace(PLAIN, error=0.2, tolerance=0.1, greatest=0.0),
            r"got 0.2 where JAX has zeros",
        ),
    ],
)
def test_what_an_output_is_refused_for(result, expected):
    check_outputs([PLAIN])
    expected = expected.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(odml.MismatchError, match=f"Output 'y' of signature 'main'.*{expected}"):
        check_outputs([PLAIN, result])


def test_a_tie_that_the_files_round_differently_is_no_mismatch(monkeypatch):
    seen = []

    def kept(*args):
        seen.append(verify.compare_own(*args))
        return seen[-1]

    monkeypatch.setattr(export, "compare_own", kept)
    params, x, mask = case()
    artifact = exported(masked_mean, params, x, mask)
    ((sites, (output,)),) = seen
    assert output.first == "reduce_sum:1 (sum, int8), by 1.0 steps of 0.125"
    assert [site.place for site in sites] == [site.place for site in artifact.report.sites]
    assert max(site.lsb for site in artifact.report.sites) <= 1.01
    (found,) = artifact.run(x=np.asarray(x), mask=mask).values()
    assert verify.sqnr(np.asarray(masked_mean(params, x, mask)), found) > 25


@pytest.mark.slow
@pytest.mark.parametrize("shown", [True, False])
def test_a_file_that_computes_something_else_names_the_site(monkeypatch, shown):
    """A file that is off: in a tensor that it shows, or in its output alone."""
    honest, files = verify.run, []

    def wrong(model, one):
        found = honest(model, one)
        files.append(model)
        if len(files) == 1:  # the one with all sites as outputs
            return found
        name = "site_1" if shown and "site_1" in found else "output_0"
        return found | {name: found[name] + 0.5}

    monkeypatch.setattr(verify, "run", wrong)
    params, x, mask = case()
    expected = "dot_general:0" if shown else "Output 'output_0'.* steps of .* reduce_sum:1 "
    with pytest.raises(odml.MismatchError, match=expected) as caught:
        exported(masked_mean, params, x, mask)
    assert "inf" not in str(caught.value)
