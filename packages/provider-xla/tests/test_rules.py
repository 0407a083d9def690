"""QuantizationRule: what it matches, and what it refuses."""

import dataclasses

import jax.numpy as jnp
import pytest

from provider_xla import PtqProvider, QtProvider, QtRule, QuantizationRule


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight_qtype": "int9"}, "weight_qtype.*int8.*got 'int9'"),
        ({"act_qtype": "itn8"}, "act_qtype.*int8.*got 'itn8'"),
        ({"act_qtype": 8}, "act_qtype.*got 8"),
        ({"module_path": "("}, "module_path must be a regular expression"),
        ({"module_path": None}, "module_path must be a regular expression"),
        ({"tile_size": -128}, "tile_size must be .*positive.*Got -128"),
        ({"tile_size": 0}, "tile_size.*Got 0"),
        ({"tile_size": 1.5}, "tile_size.*Got 1.5"),
        ({"tile_size": True}, "tile_size.*Got True"),
        ({"op_names": "dot"}, "op_names.*Got 'dot'"),
        ({"op_names": ["dott"]}, "op_names.*matmul.*Got"),
        ({"weight_calibration_method": "absmin"}, "weight_calibration_method.*absmax.*Got"),
        ({"weight_calibration_method": None}, "weight_calibration_method.*Got None"),
        ({"act_calibration_method": "rms"}, "act_calibration_method.*Got 'rms'"),
        ({"act_calibration_method": "balanced"}, "act_calibration_method.*rounds parameters"),
        ({"act_static_scale": True}, "act_static_scale must be None where act_qtype is None"),
        ({"static_range": "step"}, "static_range must be None where act_static_scale is not True"),
        (
            {"act_qtype": "int8", "act_static_scale": True, "static_range": "mean"},
            "static_range must be None, 'step' or 'joined'. Got 'mean'",
        ),
        ({"act_batch_axes": "0"}, "act_batch_axes must be a sequence of axes.*Got '0'"),
        ({"tile_size": 0.3}, "tile_size.*one over a number of tiles.*Got 0.3"),
    ],
)
def test_bad_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        QuantizationRule(**fields)


def test_rules_take_keywords_only():
    with pytest.raises(TypeError):
        QuantizationRule(".*")


def test_matching_is_of_the_whole_path():
    rule = QuantizationRule(module_path="encoder/.*", op_names=["dot", "einsum"])
    assert rule.matches("dot", "encoder/layer_0")
    assert not rule.matches("dot", "my/encoder/layer_0")
    assert not rule.matches("dot", "encoder")
    assert not rule.matches("matmul", "encoder/layer_0")
    assert QuantizationRule().matches("matmul", "")


@pytest.mark.parametrize("rules", [[8], [None], [None, QuantizationRule()]])
def test_provider_refuses_what_is_no_rule(rules):
    with pytest.raises(TypeError, match="takes QuantizationRules"):
        PtqProvider(rules)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TheirRule:
    """As ``qwix.QuantizationRule``, whose other fields have these names and defaults, too."""

    module_path: str = ".*"
    weight_qtype: str | None = None
    act_qtype: str | None = None
    op_names: tuple = ()
    tile_size: int | float | None = None
    act_static_scale: bool | None = None
    weight_calibration_method: str = "absmax"
    act_batch_axes: tuple = (0,)
    bwd_qtype: str | None = None
    additional_qt_config: dict = dataclasses.field(default_factory=dict)


TheirRule.__module__ = "qwix._src.qconfig"


def test_rules_of_qwix_keep_their_meaning():
    """A rule without op_names matches matmuls of two activations, too."""

    def fn(w, x):
        y = x @ w
        return y @ y.T

    w, x = jnp.ones((4, 6)), jnp.ones((3, 4))
    theirs = TheirRule(weight_qtype="int8", act_qtype="int8", tile_size=2)
    for rules in (theirs, [theirs]):
        plan = PtqProvider(rules).plan(fn, w, x)
        assert [op.quantized for op in plan.ops] == [True, True]
    ours = PtqProvider(QuantizationRule(weight_qtype="int8", act_qtype="int8", tile_size=2))
    assert [op.quantized for op in ours.plan(fn, w, x).ops] == [True, False]
    named = {"weight_qtype": "int8", "act_qtype": "int8", "op_names": ("einsum",)}
    assert PtqProvider(TheirRule(**named)).rules == (QuantizationRule(**named),)
    first = TheirRule(weight_qtype="int8", op_names=("dot_general",))
    with pytest.warns(UserWarning, match="rule 1 has no effect"):
        plan = PtqProvider([first, TheirRule(weight_qtype="int4")]).plan(fn, w, x)
    (weight,) = plan.weights.values()
    assert weight.qtype == "int8"
    trained = QtProvider(TheirRule(weight_qtype="int8", bwd_qtype="int8"))
    assert trained.rules == (QtRule(weight_qtype="int8", bwd_qtype="int8"),)


def test_fields_of_qwix_that_rules_lack_are_named():
    theirs = TheirRule(weight_qtype="int8", additional_qt_config={"dlhs_grad_qtype": "int8"})
    with pytest.raises(ValueError, match="got additional_qt_config"):
        QtProvider(theirs)
