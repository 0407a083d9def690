"""The table of a plan: a row for each operation, and a footer that counts these rows."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import provider_odml as odml
from interception_core.cli import main

STATIC = odml.OdmlRule(weight_qtype="int8", output_qtype="int8")
X = np.ones((4, 8), np.float32)
PARAMS = {"up": np.ones((8, 16), np.float32), "bias": np.ones(16, np.float32),
          "down": np.ones((16, 8), np.float32)}  # fmt: skip


def model(params, x):
    """A product with what is fused into it, a residual whose relu is fused, and an island."""
    with jax.named_scope("net"):
        y = jax.nn.relu(x @ params["up"] + params["bias"]) @ params["down"]
        return jax.nn.elu(jax.nn.relu(x + y))


def printed(rule):
    """Return the cells of the table, by operation, and the footer."""
    plan = odml.qat(model, [rule]).plan(PARAMS, X)
    lines = str(plan).splitlines()
    head, line, *body, footer = lines[: len(lines) - len(plan.notes)]
    starts = [0, *(m.end() for m in re.finditer(r"-+ +(?=-)", line))]
    cut = [slice(a, b) for a, b in zip(starts, [*starts[1:], None], strict=True)]
    names = [head[one].strip() for one in cut]
    rows = [dict(zip(names, (row[one].strip() for one in cut), strict=True)) for row in body]
    return {row["op"]: row for row in rows}, footer, plan


def test_what_each_operation_becomes():
    rows, footer, plan = printed(STATIC)
    found = {name: (row["runs as"], row["kernel"]) for name, row in rows.items()}
    assert found == {
        "net/dot_general:0": ("int8 x int8", "integer"),
        "net/add:0": ("fused", "net/dot_general:0"),
        "net/relu:0": ("fused", "net/dot_general:0"),
        "net/dot_general:1": ("int8 x int8", "integer"),
        "net/add:1": ("int8 x int8", "integer"),
        "net/relu:1": ("fused", "net/add:1"),
        "net/elu:0": ("float", "float"),
    }
    assert footer == f"6 of 7 operations in integers (3 integer, 3 fused), {len(plan.sites)} ranges"
    first = rows["net/dot_general:0"]
    assert (first["operands"], first["bytes"]) == ("f32[4,8] x f32[8,16]", "512 -> 128")
    assert first["weight or reason"] == "args[0]['up']"
    assert first["ranges"] == "args[1]"
    assert rows["net/relu:0"]["ranges"] == "net/relu:0"
    assert "no integer kernel for elu" in rows["net/elu:0"]["weight or reason"]


def test_the_footer_counts_the_rows():
    rules = {
        "static": STATIC,
        "dynamic": odml.OdmlRule(weight_qtype="int8", input_qtype="int8"),
        "weights": odml.OdmlRule(weight_qtype="int4"),
        "float": odml.OdmlRule(),
    }
    for name, rule in rules.items():
        rows, footer, _ = printed(rule)
        kinds = [row["runs as"] for row in rows.values()]
        integer = sum(kind.startswith("int") for kind in kinds)
        fused = kinds.count("fused")
        assert footer.startswith(f"{integer + fused} of {len(rows)} operations in integers"), name
        stored = sum(kind.startswith("float x") for kind in kinds)
        assert (f"{stored} in float with integer weights" in footer) == (stored > 0), name
        assert (integer, stored) == {
            "static": (3, 0), "dynamic": (2, 0), "weights": (0, 2), "float": (0, 0)
        }[name]  # fmt: skip


def test_weights_in_four_bits_have_half_a_byte():
    rows, _, _ = printed(odml.OdmlRule(weight_qtype="int4"))
    assert rows["net/dot_general:1"]["runs as"] == "float x int4"
    assert rows["net/dot_general:1"]["bytes"] == "512 -> 64"


def test_a_weight_is_named_through_what_is_computed_from_it():
    plan = odml.qat(lambda p, x: x @ jnp.transpose(p["w"]) * p["s"], [STATIC]).plan(
        {"w": np.ones((4, 8), np.float32), "s": np.ones(4, np.float32)}, X
    )
    found = [op["weights"] for op in plan.as_json()["ops"]]
    assert found == [("args[0]['w']",), ("args[0]['s']",)]


def test_the_plan_as_json(tmp_path, capsys):
    (tmp_path / "program.py").write_text(
        "import numpy as np\n"
        "def model(w, x):\n    return x @ w\n"
        "def case():\n    return model, np.ones((8, 4), 'f'), np.ones((2, 8), 'f')\n"
    )
    command = ["plan", f"{tmp_path}/program.py:case", "--provider", "odml-qat", "--json", "-"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    (op,) = found["ops"]
    assert (op["op_id"], op["kernel"], op["qtypes"]) == (
        "dot_general:0", "integer", ["int8", "int8"],
    )  # fmt: skip
    assert (op["bytes_before"], op["bytes_after"]) == (128, 32)
    assert [site["key"] for site in found["sites"]] == ["args[1]", "dot_general:0"]


LAYOUT = ("NHWC", "HWIO", "NHWC")
KERNELS = {"depth": np.ones((3, 3, 1, 8), np.float32), "point": np.ones((1, 1, 8, 4), np.float32)}
IMAGE = np.ones((1, 6, 6, 8), np.float32)


def separable(params, x):
    y = lax.conv_general_dilated(
        x, params["depth"], (1, 1), "SAME", dimension_numbers=LAYOUT, feature_group_count=8
    )
    return lax.conv_general_dilated(y, params["point"], (1, 1), "SAME", dimension_numbers=LAYOUT)


def plan_of(*rules, fn=separable, params=KERNELS, x=IMAGE):
    return odml.qat(fn, [odml.OdmlRule(**rule) for rule in rules]).plan(params, x)


DYNAMIC = {"weight_qtype": "int8", "input_qtype": "int8"}


def test_a_plan_says_which_kernels_are_slow():
    """Measured in LiteRT, docs/benchmarks/odml.md."""
    plan = plan_of(DYNAMIC)
    (note,) = plan.notes
    assert note.startswith("1 operation (conv_general_dilated:0): depthwise convolutions with a ")
    assert f"slow in LiteRT: {note}" in str(plan)
    assert plan.as_json()["notes"] == [note]
    (note,) = plan_of({"weight_qtype": "int8", "output_qtype": "int16"}).notes
    assert note.startswith("2 operations (conv_general_dilated:0, ...): int16 activations")
    (note,) = plan_of({"weight_qtype": "int4"}).notes
    assert "weight_qtype='int8' is fast" in note
    (note,) = plan_of({"weight_qtype": "int4"}, fn=lambda w, x: x @ w, params=X.T, x=X).notes
    assert "input_qtype='int8' is fast" in note
    # int8 with the rule's dynamic range would be slow, too.
    depthwise, _ = plan_of({"weight_qtype": "int4", "input_qtype": "int8"}).notes
    assert "multiplied as floats" in depthwise
    assert "op_names=['depthwise_conv'] before the others, with weight_qtype='int8'" in depthwise
    for fast in ({"weight_qtype": "int8", "output_qtype": "int8"}, {"weight_qtype": "int8"}, {}):
        assert plan_of(fast).notes == ()


def test_the_advice_about_depthwise_convolutions_can_be_followed():
    plan = plan_of({"op_names": ["depthwise_conv"], "weight_qtype": "int8"}, DYNAMIC)
    assert plan.notes == plan.problems == ()
    kernels = [op["kernel"] for op in plan.as_json()["ops"]]
    assert kernels == ["float, integer weight", "integer"]


@pytest.mark.parametrize("qtype", ["int4", "int2"])
def test_convolutions_without_a_kernel_multiply_floats(qtype):
    """The converter takes no int2 parameter in one, LiteRT no int4 one in a depthwise."""
    (depth, point) = plan_of({**DYNAMIC, "weight_qtype": qtype}).as_json()["ops"]
    assert depth["kernel"] == "float, integer weight"
    assert f"no depthwise convolution of {qtype}" in depth["reason"] or qtype == "int2"
    assert point["kernel"] == ("integer" if qtype == "int4" else "float, integer weight")
    static = plan_of({"weight_qtype": qtype, "output_qtype": "int8"}).as_json()["ops"]
    assert [op["kernel"] for op in static] == ["integer" if qtype == "int4" else "float"] * 2
