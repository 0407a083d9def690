"""``jaxtap report``: what it prints and writes, and says of wrong input."""

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
    path = tmp_path / "reported_program.py"
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


def test_a_report_of_types(file, capsys):
    err = refused(capsys, "report", f"{file}:model", "params", "f32[4,16]")
    assert "its arguments must have values" in err


@pytest.mark.parametrize("option", [("--sort", "colour"), ("--top", "0"), ("--tile", "x")])
def test_wrong_options(file, capsys, option):
    assert option[0] in refused(capsys, "report", f"{file}:case", *option, status=2)


@pytest.mark.filterwarnings("ignore:Static ranges cut off")
def test_a_report_with_static_ranges(file, capsys):
    out = printed(capsys, "report", f"{file}:case", "--rules", "static", "--no-time")
    assert "int8 x int8" in out
    assert "note: Static ranges cut off more than 10% of dense/matmul:0#lhs" in out


@pytest.mark.slow
def test_a_report_and_its_files(file, tmp_path):
    command = ["-m", "interception_core", "report", f"{file}:case"]
    options = ["--rules", "rules", "--html", "page.html", "--json", "report.json"]
    run = run_python(*command, *options, strict=False, cwd=tmp_path)
    assert "dense/matmul:0" in run.stdout
    assert run.stdout.endswith("Wrote report.json.\nWrote page.html.\n")
    (op,) = json.loads((tmp_path / "report.json").read_text())["ops"]
    assert op["qtypes"] == [None, "int4"]
    assert op["seconds"] > 0
    page = (tmp_path / "page.html").read_text()
    assert "<title>reported_program.py:case</title>" in page
    assert "dense/matmul:0" in page


def test_help_does_without_jax():
    code = (
        "import sys; from interception_core.cli import main; "
        "status = main(['report', '--help']); "
        "print('jax' in sys.modules or 'jinja2' in sys.modules); sys.exit(status)"
    )
    run = run_python("-c", code)
    assert run.stdout.splitlines()[-1] == "False"
    assert "--rules RULES" in run.stdout


OF_ANOTHER = '''

class Another:
    """A provider with a report, which is not provider-xla's."""

    engine, disable_jit, problems, weights = None, False, (), ("w",)

    def interceptor(self):
        return None

    def apply(self, fn):
        return fn

    def plan(self, fn, params, *args):
        return self

    def quantize(self, params):
        return params

    def report(self, params, *args):
        return Found()

class Found:
    def __str__(self):
        return "no error at all"

    def as_json(self):
        return {"error": 0}

another = Another()
'''


def test_the_report_of_another_provider(file, capsys, tmp_path):
    with open(file, "a") as program:
        program.write(OF_ANOTHER)
    given = ["report", f"{file}:case", "--rules", "another"]
    assert printed(capsys, *given) == "no error at all\n"
    assert json.loads(printed(capsys, *given, "--json", "-")) == {"error": 0}
    path = tmp_path / "found.json"
    assert printed(capsys, *given, "--json", str(path)) == f"no error at all\nWrote {path}.\n"
    assert json.loads(path.read_text()) == {"error": 0}
    said = refused(capsys, *given, "--html", "x.html", "--no-time")
    assert "--html and --no-time must be left out with a Another" in said
    assert "--json needs as_json(), got a Another without" in refused(
        capsys, "plan", *given[1:], "--json", "-"
    )


MODELS = """
import jax
import numpy as np
import equinox as eqx
from flax import nnx

x = np.linspace(-2, 1, 64, dtype=np.float32).reshape(4, 16)
row = x[0]
net = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
tower = eqx.nn.MLP(16, 8, 4, 1, key=jax.random.key(0))
"""


def test_model_objects(tmp_path, capsys):
    """A model holds its parameters; what follows are its inputs."""
    for library in ("equinox", "flax"):
        pytest.importorskip(library)
    file = tmp_path / "reported_models.py"
    file.write_text(MODELS)
    for name, given in (("net", "x"), ("tower", "row")):
        out = printed(capsys, "report", f"{file}:{name}", given, "--no-time")
        assert "int8 x int8" in out
