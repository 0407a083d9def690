"""Rules with adapters as they are written: LoraRule, Rule(lora=), Qwix's, and the preset."""

import dataclasses

import numpy as np
import pytest

import provider_xla as xla
from jaxtap_testkit.xla_samples import draw
from provider_xla import Lora, LoraRule, PtqProvider, Rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class TheirRule:
    """As ``qwix.LoraRule``, which makes factors by functions."""

    rank: int
    alpha: float
    module_path: str = ".*"
    weight_qtype: str | None = None
    tile_size: int | float | None = None
    dropout: float = 0.0
    lora_a_initializer: object = len


TheirRule.__module__ = "qwix._src.providers.lora"


def test_rules_of_qwix():
    theirs = TheirRule(weight_qtype="nf4", tile_size=32, rank=4, alpha=8.0, dropout=0.1)
    ours = LoraRule(weight_qtype="nf4", tile_size=32, rank=4, alpha=8.0, dropout=0.1)
    for rules in (theirs, [theirs]):
        assert PtqProvider(rules).rules == (ours,)
    with pytest.raises(ValueError, match="got lora_a_initializer"):
        PtqProvider(dataclasses.replace(theirs, lora_a_initializer=max))


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        (
            Rule(weight="nf4", lora=Lora(4, alpha=8.0, dropout=0.1)),
            LoraRule(weight_qtype="nf4", rank=4, alpha=8.0, dropout=0.1),
        ),
        (Rule("mlp", lora=4), LoraRule(module_path="mlp", rank=4)),
    ],
)
def test_short_rules(written, rule):
    assert written == rule


@pytest.mark.parametrize("lora", ["4", 0, True])
def test_ranks_that_are_none(lora):
    with pytest.raises(ValueError, match=r"LoraRule.rank must be a positive integer"):
        Rule(weight="int8", lora=lora)


def test_the_preset():
    w, x = draw((128, 32), (8, 128))
    plan = PtqProvider("qlora").plan(lambda w, x: x @ w, w, x)
    assert [op.adapter for op in plan.ops] == ["rank 8"]
    assert plan.rules.rules == (LoraRule(weight_qtype="nf4", tile_size=64, rank=8),)
    (tiled,) = PtqProvider("qlora/32").rules
    assert tiled == LoraRule(weight_qtype="nf4", tile_size=32, rank=8)
    found, exact = plan.apply()(plan.quantize(w), x), np.asarray(x) @ np.asarray(w)
    assert np.linalg.norm(found - exact) < 0.25 * np.linalg.norm(exact)
    assert "qlora" in str(xla.presets())
