"""``jaxtap quantize``: float files to quantized ones."""

import json

import numpy as np
import pytest

import provider_xla as xla
import quant_numerics as qn
from interception_core.cli import main

PROGRAM = """
import jax
import provider_xla as xla

def fn(params, x):
    for layer in params["layers"]:
        x = jax.nn.relu(x @ layer["up"]) @ layer["down"]
    return x * params["scale"]

def typed(shape):
    return jax.ShapeDtypeStruct(shape, "float32")

LAYER = {"up": typed((32, 64)), "down": typed((64, 32))}

def case():
    return fn, {"layers": [LAYER, LAYER], "scale": typed((32,))}, typed((4, 32))

def swapped(x, params):
    return fn(params, x)

provider = xla.PtqProvider("int8", params_argnum=1)
static = xla.Rule(weight="int8", act=xla.Static("int8"))
strict = [xla.Rule("nowhere", weight="int8")]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "quantized_program.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.fixture
def floats(tmp_path):
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    shapes = {"up": (32, 64), "down": (64, 32)}
    tensors = {f"layers.{i}.{n}": rng.normal(size=s) for i in range(2) for n, s in shapes.items()}
    tensors["scale"] = np.ones(32)
    tensors = {name: array.astype(np.float32) for name, array in tensors.items()}
    save_file(tensors, tmp_path / "params.safetensors")
    return tmp_path / "params.safetensors", tensors


def run(capsys, *arguments, status=0):
    assert main(["quantize", *map(str, arguments)]) == status
    return capsys.readouterr()


def near(stored, expected):
    assert sorted(stored) == ["layers", "scale"]
    assert isinstance(stored["layers"], list)
    for i, layer in enumerate(stored["layers"]):
        for name, one in layer.items():
            exact = expected[f"layers.{i}.{name}"].astype(np.float64)
            error = np.linalg.norm(np.asarray(qn.dequantize(one), np.float64) - exact)
            assert error < 0.01 * np.linalg.norm(exact)


@pytest.mark.parametrize(
    "arguments",
    [("fn", "f32[4,32]"), ("case",), ("swapped", "f32[4,32]", "--rules", "provider")],
    ids=["the parameters of the file", "a case", "parameters at another place"],
)
def test_the_file_has_what_the_plan_says(capsys, tmp_path, file, floats, arguments):
    source, tensors = floats
    name, *others = arguments
    preset = () if "--rules" in others else ("--preset", "int8")
    out = tmp_path / "out.safetensors"
    found = run(capsys, f"{file}:{name}", source, out, *others, *preset)
    assert "4 of 5 parameters quantized" in found.out
    assert found.out.endswith(f"Wrote {out}.\n")
    near(xla.load(out), tensors)


def test_a_model_object(capsys, tmp_path, file):
    import equinox as eqx
    import jax
    from safetensors.numpy import save_file

    program = tmp_path / "quantized_model.py"
    program.write_text(
        "import equinox as eqx, jax\n"
        "net = eqx.filter_eval_shape(eqx.nn.MLP, 32, 16, 64, 1, key=jax.random.key(0))\n"
    )
    rng = np.random.default_rng(0)
    shapes = {"layers.0.weight": (64, 32), "layers.0.bias": (64,)}
    shapes |= {"layers.1.weight": (16, 64), "layers.1.bias": (16,)}
    tensors = {name: rng.normal(size=s).astype(np.float32) for name, s in shapes.items()}
    save_file(tensors, tmp_path / "net.safetensors")
    out = tmp_path / "out.safetensors"
    found = run(
        capsys, f"{program}:net", tmp_path / "net.safetensors", out, "f32[32]", "--preset", "int8"
    )
    assert "2 of 4 parameters quantized" in found.out
    net = eqx.filter_eval_shape(eqx.nn.MLP, 32, 16, 64, 1, key=jax.random.key(0))
    loaded = xla.load(out, template=net)
    leaves = jax.tree.leaves(loaded, is_leaf=lambda x: isinstance(x, qn.QArray))
    stored = {x.shape: x for x in leaves if hasattr(x, "shape")}
    for name, exact in tensors.items():
        one = stored[exact.shape]
        value = qn.dequantize(one) if isinstance(one, qn.QArray) else one
        error = np.linalg.norm(np.asarray(value, np.float64) - exact)
        assert error < 0.01 * np.linalg.norm(exact)
        assert isinstance(one, qn.QArray) == name.endswith("weight")


def test_json(capsys, tmp_path, file, floats):
    source, _ = floats
    out = tmp_path / "out.safetensors"
    arguments = f"{file}:case", source, out, "--weight", "int8", "--json"
    content = json.loads(run(capsys, *arguments).out)
    assert content["out"] == str(out)
    assert (content["weights"], content["parameters"], content["problems"]) == (4, 5, [])
    assert content["bytes_before"] == 4 * (4 * 32 * 64 + 32)
    assert content["bytes_after"] < 0.3 * content["bytes_before"]


def test_numbers_of_64_bits(capsys, tmp_path, file, floats):
    """JAX has none where x64 is off, and a shell cannot convert the file."""
    from safetensors.numpy import save_file

    _, tensors = floats
    source, out = tmp_path / "wide.safetensors", tmp_path / "out.safetensors"
    save_file({name: array.astype(np.float64) for name, array in tensors.items()}, source)
    run(capsys, f"{file}:fn", source, out, "f32[4,32]", "--preset", "int8")
    stored = xla.load(out)
    near(stored, tensors)
    assert stored["scale"].dtype == np.float32
    count = {"count": np.array([2**40])}
    save_file({**tensors, **count}, source)
    said = run(
        capsys, f"{file}:fn", source, out, "f32[4,32]", "--preset", "int8", "--overwrite", status=1
    )
    assert "must be int32 or narrower, got int64" in said.err


def test_what_is_there_stays_without_a_word(capsys, tmp_path, file, floats):
    source, tensors = floats
    out = tmp_path / "out.safetensors"
    out.write_text("mine")
    assert "must not exist" in run(capsys, f"{file}:case", source, out, status=1).err
    assert out.read_text() == "mine"
    run(capsys, f"{file}:case", source, out, "--preset", "int8", "--overwrite")
    near(xla.load(out), tensors)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("fn", "params.safetensors", "x/out", "f32[4,32]"), "Make the folder"),
        (("fn", "none.safetensors", "out", "f32[4,32]"), "does not exist"),
        (("fn", "params.safetensors", "out"), "Give the arguments"),
        (("fn", "params.safetensors", "out", "f32[4,31]"), "can't be planned"),
        (("case", "params.safetensors", "out", "--preset", "INT8"), "Did you mean 'int8'?"),
        (("case", "params.safetensors", "out", "--rules", "static"), "plan.calibrate"),
        (
            ("case", "params.safetensors", "out", "--rules", "strict", "--strict"),
            "can't be followed",
        ),
        (("case", "model.safetensors", "out"), "must be made of tensors of"),
        (("fn", "clash.safetensors", "out", "f32[4,32]"), "must nest by their dots"),
    ],
)
def test_wrong_input(capsys, monkeypatch, tmp_path, file, floats, arguments, told):
    from safetensors.numpy import save_file

    monkeypatch.chdir(tmp_path)
    save_file({"w": np.ones((2, 2), np.float32)}, "model.safetensors")
    save_file({"w": np.ones(2, np.float32), "w.b": np.ones(2, np.float32)}, "clash.safetensors")
    name, *others = arguments
    found = run(capsys, f"{file}:{name}", *others, status=1)
    assert found.err.startswith("jaxtap: error: ")
    assert "Traceback" not in found.err
    assert told in found.err
    assert not (tmp_path / "out").exists()
