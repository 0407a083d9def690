"""OdmlRule: its fields, its modes, what it matches, and what it refuses."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import pytest

from provider_odml import OdmlQatProvider, OdmlRule, qat

STATIC = {"weight_qtype": "int8", "output_qtype": "int8"}
DYNAMIC = {"weight_qtype": "int8", "input_qtype": "int8"}

BLOCKS = {"weight_qtype": "int4", "tile_size": 32}


@pytest.mark.parametrize(
    ("fields", "static", "dynamic", "text"),
    [
        (STATIC, True, False, "W8A8 static"),
        ({"weight_qtype": "int4", "output_qtype": "int16"}, True, False, "W4A16 static"),
        ({"output_qtype": "int8"}, True, False, "A8 static"),
        (DYNAMIC, False, True, "W8A8 dynamic"),
        ({"weight_qtype": "int2"}, False, False, "W2 weight-only"),
        ({**DYNAMIC, **BLOCKS}, False, True, "W4/32A8 dynamic"),
        ({}, False, False, "float"),
    ],
)
def test_modes(fields, static, dynamic, text):
    rule = OdmlRule(**fields)
    assert (rule.is_static, rule.is_dynamic, str(rule)) == (static, dynamic, text)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"module_path": "("}, ["OdmlRule.module_path", "regular expression", "'('"]),
        ({"module_path": 3}, ["OdmlRule.module_path", "3"]),
        ({"op_names": "einsum"}, ["OdmlRule.op_names", "einsum", "dot_general"]),
        ({"op_names": ["conv"]}, ["OdmlRule.op_names", "'conv'", "conv_general_dilated"]),
        ({"weight_qtype": "int16"}, ["OdmlRule.weight_qtype", "int8, int4, int2", "'int16'"]),
        ({"weight_qtype": "float8_e4m3fn"}, ["OdmlRule.weight_qtype", "float8_e4m3fn"]),
        ({"weight_qtype": "nonsense"}, ["OdmlRule.weight_qtype", "'nonsense'"]),
        ({"output_qtype": "int4"}, ["OdmlRule.output_qtype", "int8, int16", "'int4'"]),
        ({"output_qtype": 8}, ["OdmlRule.output_qtype", "8"]),
        ({**DYNAMIC, "input_qtype": "int16"}, ["OdmlRule.input_qtype", "int8", "'int16'"]),
        ({**DYNAMIC, **STATIC}, ["OdmlRule.input_qtype", "where output_qtype", "'int8'"]),
        ({**DYNAMIC, "weight_qtype": None}, ["OdmlRule.input_qtype", "weight_qtype is None"]),
        ({**DYNAMIC, "static_range": "step"}, ["OdmlRule.static_range", "no static range"]),
        ({**DYNAMIC, **BLOCKS, "tile_size": 48}, ["OdmlRule.tile_size", "32, 64, 128, 256", "48"]),
        ({**DYNAMIC, **BLOCKS, "tile_size": 32.0}, ["OdmlRule.tile_size", "32.0"]),
        ({**DYNAMIC, "tile_size": 32}, ["OdmlRule.tile_size", "'int4' or 'int2'", "32"]),
        ({**STATIC, **BLOCKS}, ["OdmlRule.tile_size", "output_qtype is set", "input_qtype='int8'"]),
        ({"weight_calibration_method": "minmax"}, ["OdmlRule.weight_calibration_method", "minmax"]),
        ({"weight_calibration_method": None}, ["OdmlRule.weight_calibration_method"]),
        ({"act_calibration_method": "balanced"}, ["act_calibration_method", "rounds weights"]),
        (
            {"weight_qtype": "int4", "tile_size": 32, "weight_calibration_method": "balanced"},
            ["weight_calibration_method", "tile_size", "rounded to nearest"],
        ),
        ({"act_calibration_method": "median"}, ["OdmlRule.act_calibration_method", "median"]),
        ({"act_batch_axes": "0"}, ["OdmlRule.act_batch_axes", "'0'"]),
        ({"act_batch_axes": [0.5]}, ["OdmlRule.act_batch_axes", "0.5"]),
        ({"act_batch_axes": 0}, ["OdmlRule.act_batch_axes"]),
        ({"op_names": 3}, ["OdmlRule.op_names", "3"]),
    ],
)
def test_a_wrong_field_is_named_with_what_is_allowed(fields, names):
    with pytest.raises(ValueError, match=r"OdmlRule\.") as error:
        OdmlRule(**fields)
    for name in names:
        assert name in str(error.value)


@pytest.mark.parametrize("field", ["act_qtype", "act_static_scale"])
def test_a_field_of_qwix_that_means_two_things_here_teaches_both(field):
    with pytest.raises(TypeError, match=r"output_qtype for integer outputs.*input_qtype"):
        OdmlRule(weight_qtype="int8", **{field: "int8"})


def test_a_rule_can_be_copied_and_changed():
    rule = OdmlRule(**STATIC)
    assert pickle.loads(pickle.dumps(rule)) == copy.deepcopy(rule) == rule
    assert str(dataclasses.replace(rule, output_qtype="int16")) == "W8A16 static"


def test_fields_are_named():
    with pytest.raises(TypeError):
        OdmlRule("encoder.*")


@pytest.mark.parametrize("given", ["int8", jnp.int8, jnp.dtype("int8")])
def test_qtypes_may_be_dtypes(given):
    rule = OdmlRule(weight_qtype=given, output_qtype=given)
    assert (rule.weight_qtype, rule.output_qtype) == ("int8", "int8")


@pytest.mark.parametrize(
    ("fields", "names", "path", "expected"),
    [
        ({}, {"dot_general"}, "", True),
        ({"module_path": "enc"}, {"dot_general"}, "enc/Dense_0", False),
        ({"module_path": "enc.*"}, {"dot_general"}, "enc/Dense_0", True),
        ({"module_path": ".*Dense_0"}, {"dot_general"}, "enc/Dense_0", True),
        ({"op_names": ["einsum"]}, {"dot_general"}, "", False),
        ({"op_names": ["einsum"]}, {"dot_general", "einsum"}, "", True),
        ({"op_names": ["einsum", "add"], "module_path": "a"}, {"add"}, "b", False),
        ({"op_names": []}, {"add"}, "b", True),
    ],
)
def test_what_matches(fields, names, path, expected):
    assert OdmlRule(**fields).matches(names, path) is expected


def test_equal_rules_are_equal_whatever_the_containers():
    one = OdmlRule(op_names=["dot_general", "add"], act_batch_axes=[0, 1])
    other = OdmlRule(op_names={"add", "dot_general"}, act_batch_axes=(0, 1))
    assert one == other
    assert hash(one) == hash(other)


def test_rules_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        OdmlRule().output_qtype = "int8"


@pytest.mark.parametrize(
    ("fields", "method"),
    [
        (STATIC, "minmax"),
        ({**STATIC, "act_calibration_method": "rms,3"}, "rms,3"),
        ({"output_qtype": "int16"}, "absmax"),
        ({"output_qtype": "int16", "act_calibration_method": "minmax,0.9"}, "absmax,0.9"),
    ],
)
def test_the_method_of_activations(fields, method):
    assert OdmlRule(**fields).act_method == method


def test_an_int16_range_has_no_zero_point_with_a_fixed_method():
    """Whatever the method: LiteRT's int16 is symmetric."""
    rule = OdmlRule(weight_qtype="int8", output_qtype="int16", act_calibration_method="fixed,-1,2")
    w, x = jnp.ones((3, 2)), jnp.ones((4, 3))
    model = qat(lambda w, x: x @ w, [rule])
    stats = model.init(w, x)
    jax.block_until_ready(model(w, x, quant_stats=stats))
    assert all(one.symmetric for one in stats.values())


@pytest.mark.parametrize("rules", [["int8"], [OdmlRule(), None], [{}]])
def test_rules_of_another_type(rules):
    with pytest.raises(TypeError, match="OdmlRule"):
        OdmlQatProvider(rules)


@pytest.mark.parametrize(
    "given", [3, (1, 2), (0, 0), (2, 1), (-1,), ("a", "b"), (float("nan"), 1), (0, float("inf"))]
)
@pytest.mark.parametrize("name", ["fixed_range_for_inputs", "fixed_range_for_outputs"])
def test_fixed_ranges_that_are_none(name, given):
    with pytest.raises(ValueError, match=name):
        OdmlQatProvider(**{name: given})
