"""``jaxtap trace``: what it prints, and what it says of wrong input."""

import json
import textwrap

import pytest

from interception_core.cli import main

PROGRAM = """
import jax
import jax.numpy as jnp

params = {"w": jnp.ones((16, 8)), "layers": jnp.ones((3, 16, 16))}

def forward(p, x):
    with jax.named_scope("encoder"):
        x = jax.nn.gelu(x @ p["w"].T)
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["layers"])[0]

def masked(p, x):
    return (x @ (p["w"] * 2).T) @ jnp.flip(p["w"], 0)[:, :8] @ x.T

def constant():
    return jnp.exp(jnp.ones(3))

number = 3
"""
HIGH = """
from jaxtap_testkit import hijax_samples as samples
import jax

def forward(x):
    return jax.jit(lambda q: samples.dequantize(q))(samples.quantize(x))
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "traced_program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return str(path)


def printed(capsys, *arguments):
    assert main(["trace", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    assert main(["trace", *arguments]) == 1
    return capsys.readouterr().err


@pytest.fixture
def high_file(tmp_path):
    path = tmp_path / "high_program.py"
    path.write_text(textwrap.dedent(HIGH))
    return str(path)


def test_high_types_and_jaxprs(high_file, capsys):
    out = printed(capsys, f"{high_file}:forward", "f32[2,3]", "--high")
    table, _, high = out.partition("High jaxprs:")
    assert "  the program: 2 equations" in high
    assert "  the program / jit(<lambda>): 1 equations" in high
    rows = table.splitlines()[2:-2]
    (made,) = [row for row in rows if "hi Quantize" in row]
    assert "f32[2,3] = args[0]" in made
    (used,) = [row for row in rows if "hi Dequantize" in row]
    inside = rows[rows.index(made) + 1 : rows.index(used)]
    assert inside
    assert all("call_hi_primitive" in row for row in inside)


def test_table(file, capsys):
    lines = printed(capsys, f"{file}:forward", "params", "f32[4,8]").splitlines()
    ids = [line.split()[0] for line in lines[2:-2]]
    assert "encoder/matmul:0" in ids
    assert "encoder/gelu:0" in ids
    assert "scan(<lambda>)/dot_general:0" in ids
    (product,) = [line for line in lines if line.startswith("encoder/dot_general:0")]
    assert "f32[4,8] = args[1], f32[8,16] = args[0]['w'] axes [1, 0]" in product


def test_json_of_one_target(file, capsys):
    arguments = ("params", "f32[4,8]", "--tap", "primitive:dot_general", "--json")
    content = json.loads(printed(capsys, f"{file}:forward", *arguments))
    first, second = content["operations"]
    assert first["op_id"] == "encoder/dot_general:0"
    assert first["provenance"] == ["args[1]", "args[0]['w']"]
    assert second["op_id"] == "scan(<lambda>)/dot_general:0"
    assert second["axes"] == [None, [None, 0, 1]]
    assert not first["high"]


def test_how_operands_are_computed_from_parameters(file, capsys):
    arguments = ("params", "f32[4,8]", "--tap", "primitive:dot_general")
    out = printed(capsys, f"{file}:masked", *arguments, "--params", "args[0]")
    first, second, third = out.splitlines()[2:5]
    assert "f32[8,16] = derived: transpose(mul(args[0]['w'], " in first
    assert "f32[16,8] = view: " in second
    assert "rev(args[0]['w'])" in second
    assert "args" not in third.replace("args[1]", "")
    content = json.loads(printed(capsys, f"{file}:masked", *arguments, "--json"))
    assert content["operations"][0]["computed"] == [None, None]


def test_no_arguments(file, capsys):
    assert "exp:0" in printed(capsys, f"{file}:constant")


def test_no_high_jaxpr(file, capsys):
    assert "No jaxpr is high." in printed(capsys, f"{file}:constant", "--high")


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        ("forwards", (), "got 'forwards'. Name one of: forward, masked, constant."),
        ("number", (), "FUNCTION must be a function in"),
        ("forward", ("params",), "missing 1 required positional argument: 'x'"),
        ("forward", ("params", "f32[4,9]"), "dot_general"),
        ("forward", ("parms", "f32[4,8]"), "name 'parms' is not defined"),
        ("forward", ("params", "f33[4,8]"), "must be a type or an expression of names in"),
        ("forward", ("params", "f32[4,8]", "--tap", "primitive:dots"), "Unknown primitive 'dots'"),
    ],
)
def test_wrong_input(file, capsys, function, arguments, said):
    assert said in refused(capsys, f"{file}:{function}", *arguments)


@pytest.mark.parametrize("given", ["nowhere.py:forward", "forward", ":forward"])
def test_no_file(given, capsys):
    assert "must be FILE:FUNCTION with an existing file" in refused(capsys, given)


def test_a_file_that_fails(tmp_path, capsys):
    path = tmp_path / "failing_program.py"
    path.write_text("1 / 0")
    assert "which raises ZeroDivisionError: division by zero" in refused(capsys, f"{path}:f")
