"""``jaxtap plan``, ``explain`` and ``presets``: what they print, and say of wrong input."""

import json

import pytest

from interception_core.cli import main
from jaxtap_testkit.processes import run_python

PROGRAM = """
import jax
import numpy as np
import provider_xla as xla

params = {"w": np.linspace(-1, 1, 128, dtype="f4").reshape(16, 8), "b": np.ones(8, "f4")}
x = np.linspace(-2, 1, 64, dtype=np.float32).reshape(4, 16)
rules = [xla.QuantizationRule(module_path="dense", weight_qtype="int4", tile_size=8)]
provider = xla.PtqProvider(rules)
static = xla.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)

def model(p, x):
    with jax.named_scope("dense"):
        return x @ p["w"] + p["b"]

def case():
    return model, params, x

def three():
    return 3

def fails():
    raise RuntimeError("no data here")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "planned_program.py"
    path.write_text(PROGRAM)
    return str(path)


def printed(capsys, *arguments):
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments, status=1):
    assert main(list(arguments)) == status
    found = capsys.readouterr()
    assert found.out == ""
    return found.err


def ops(capsys, *arguments):
    content = json.loads(printed(capsys, "plan", *arguments, "--json", "-"))
    return [(op["op_id"], *op["qtypes"]) for op in content["ops"]]


def test_a_plan(file, capsys):
    out = printed(capsys, "plan", f"{file}:case")
    assert "dense/matmul:0" in out
    assert "1 of 1 operations quantized" in out


@pytest.mark.parametrize(
    ("options", "qtypes"),
    [
        ((), ("int8", "int8")),
        (("--weight", "int4"), (None, "int4")),
        (("--act", "float8_e4m3fn"), ("float8_e4m3fn", None)),
        (("--rules", "rules"), (None, "int4")),
        (("--rules", "provider"), (None, "int4")),
        (("--rules", '{"weight_qtype": "int8", "act_qtype": "int4"}'), ("int4", "int8")),
        (("--rules", '[{"module_path": "x"}, {"weight_qtype": "int2"}]'), (None, "int2")),
        (("--weight", "int4", "--tile", "0.25", "--engine", "patch"), (None, "int4")),
    ],
)
def test_rules(file, capsys, options, qtypes):
    assert ops(capsys, f"{file}:case", *options) == [("dense/matmul:0", *qtypes)]


def test_arguments_as_those_of_trace(file, capsys):
    found = ops(capsys, f"{file}:model", "params", "f32[4,16]", "--weight", "int8")
    assert found == [("dense/matmul:0", None, "int8")]


def test_problems_are_printed(file, capsys):
    out = printed(capsys, "plan", f"{file}:case", "--rules", '[{"module_path": "x"}]')
    assert "problem: rule 0 has no effect" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere.py:f",), "must be FILE:FUNCTION with an existing file"),
        (("{}",), "where the function is missing. Write for example"),
        (("{}:nothing",), "got 'nothing'. Name one of: model, case, three, fails."),
        (("{}:three",), "returned an object of type int. Give the arguments"),
        (("{}:fails",), "can't be called without arguments: RuntimeError: no data here."),
        (("{}:model",), "missing 2 required positional arguments"),
        (("{}:model", "parms", "x"), "name 'parms' is not defined"),
        (("{}:model", "params", "params"), "can't be planned: "),
        (("{}:case", "--weight", "int9"), "The rules can't be used: ValueError: "),
        (("{}:case", "--rules", "x"), "The rules can't be used: "),
        (("{}:case", "--rules", "{"), "--rules must be JSON, got '{'"),
        (("{}:case", "--rules", "[1]"), "objects of a rule's fields, got 1"),
        (("{}:case", "--rules", '{"weight": 1}'), "no field 'weight'. It has: module_path"),
        (("{}:case", "--rules", "rules", "--weight", "int8"), "either --rules, or"),
        (("{}:case", "--rules", "provider", "--strict"), "left out for the provider provider"),
        (("{}:case", "--provider", "nobody"), "Unknown provider 'nobody'"),
        (("{}:case", "--provider", "ptq", "--weight", "int8"), "--weight can't be given with"),
        (("{}:case", "--provider", "ptq", "--config", "[1]"), "must be an object in JSON, got"),
        (("{}:case", "--provider", "ptq", "--config", "{"), "must be an object in JSON, got"),
        (("{}:case", "--config", "{}"), "--config is for --provider NAME"),
        (("{}:case", "--rules", '[{"module_path": "x"}]', "--strict"), "(strict=True)"),
        (("{}:case", "--json", "{}/no/plan.json"), "There is no folder"),
    ],
)
def test_wrong_input(file, capsys, arguments, said):
    assert said in refused(
        capsys, "plan", *(a.replace("{}", file) if a != "{" else a for a in arguments)
    )


@pytest.mark.parametrize("name", ["ptq", "odml-qat"])
def test_a_provider_by_name(file, capsys, name):
    out = printed(capsys, "plan", f"{file}:case", "--provider", name, "--config", "{}")
    assert "int8" in out


def test_help_does_without_jax():
    code = (
        "import sys; from interception_core.cli import main; "
        "status = main(['plan', '--help']); "
        "print('jax' in sys.modules or 'jinja2' in sys.modules); sys.exit(status)"
    )
    run = run_python("-c", code)
    assert run.stdout.splitlines()[-1] == "False"
    assert "--rules RULES" in run.stdout


MODELS = """
import jax
import jax.numpy as jnp
import numpy as np
import equinox as eqx
from flax import linen, nnx

x = np.linspace(-2, 1, 64, dtype=np.float32).reshape(4, 16)

class Net(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(16, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.encode(x) + 1

    def encode(self, x):
        return self.dense(x)

net = Net()
unbound = linen.Dense(8)
bound = unbound.bind(linen.Dense(8).init(jax.random.key(0), x))
tower = eqx.nn.MLP(16, 8, 4, 1, key=jax.random.key(0))
row = x[0]

def case():
    return net, x

def method():
    return net.encode, x

@eqx.filter_jit
def jitted(params, x):
    return x @ params
"""


def test_model_objects(tmp_path, capsys):
    """A model holds its parameters; what follows are its inputs."""
    for library in ("equinox", "flax"):
        pytest.importorskip(library)
    file = tmp_path / "planned_models.py"
    file.write_text(MODELS)
    op = "dense/dot_general:0", "int8", "int8"
    for name, *inputs in (("net", "x"), ("case",), ("method",), ("net", "f32[4,16]")):
        assert ops(capsys, f"{file}:{name}", *inputs) == [op]
    assert len(ops(capsys, f"{file}:bound", "x")) == 1
    assert len(ops(capsys, f"{file}:tower", "row")) == 2
    assert len(ops(capsys, f"{file}:jitted", "f32[16,8]", "x")) == 1
    assert "Bind a Linen module first" in refused(capsys, "plan", f"{file}:unbound", "x")


def test_presets(file, capsys):
    found = json.loads(printed(capsys, "presets", "--json"))
    assert {"int8", "w4a8", "train-fp8"} <= {one["name"] for one in found}
    assert "w4a8" in printed(capsys, "presets")
    assert ops(capsys, f"{file}:case", "--preset", "w8a8") == [("dense/matmul:0", "int8", "int8")]
    assert "Did you mean 'w8a8'" in refused(capsys, "plan", f"{file}:case", "--preset", "w8a9")
    both = ("plan", f"{file}:case", "--preset", "int8", "--weight", "int4")
    assert "Give either --preset, or --rules" in refused(capsys, *both)
    other = ("plan", f"{file}:case", "--preset", "int8", "--provider", "ptq")
    assert "--preset can't be given with --provider" in refused(capsys, *other)


def test_explain(file, capsys):
    text = printed(capsys, "explain", f"{file}:case", "--preset", "int8", "--name", "['w']")
    assert "args[0]['w']: float32[16, 8]\nstored in int8 by rule 0" in text
    assert "the nearest are" in refused(capsys, "explain", f"{file}:case", "--name", "wx")
