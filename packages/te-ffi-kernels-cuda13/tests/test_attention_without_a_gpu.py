"""Attention's kernels on any machine: which calls they take, and how much memory that asks for."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest

import te_ffi_kernels as te
from interception_core.testing import installed_plugins
from te_ffi_kernels import AttnBiasType, QKVLayout
from te_ffi_kernels import op as ops
from te_ffi_kernels_cuda13 import _attention, _cudnn, _gpus, _supports

BUILT = importlib.util.find_spec("te_ffi_kernels_cuda13._native") is not None
needs_native = pytest.mark.skipif(not BUILT, reason="built without nvcc")
ASKED = _supports.attention
OPS = ("fused_attn_forward", "fused_attn_backward")
GIVEN = {
    "b": 2, "sq": 64, "skv": 64, "h": 4, "g": 4, "d": 64, "dv": 64, "dtype": jnp.bfloat16,
    "bias": None, "mask": 0, "softmax": 0, "layout": 9, "scale": 0.1, "dropout": 0.0,
    "training": True, "segments": 1, "window": None,
}  # fmt: skip


def program(**changed):
    """Value and gradients of attention, and the shapes of its operands."""
    given = GIVEN | changed
    b, sq, skv, h, g = (given[name] for name in ("b", "sq", "skv", "h", "g"))
    layout = QKVLayout(given["layout"])
    q, k = (b, sq, h, given["d"]), (b, skv, g, given["d"])
    shapes = [q, k, (b, skv, g, given["dv"])]
    if layout.is_kvpacked():
        shapes = [q, (b, skv, 2, g, given["d"])]
    elif layout.is_qkvpacked():
        shapes = [(b, sq, 3, h, given["d"])]
    arrays = [jax.ShapeDtypeStruct(shape, given["dtype"]) for shape in shapes]
    kind = AttnBiasType.NO_BIAS
    bias = None
    if given["bias"] is not None:
        kind = AttnBiasType(given["bias"])
        bias = jax.ShapeDtypeStruct((1, h, sq, skv), given["dtype"])
    offset = None
    if given["softmax"]:
        offset = jax.ShapeDtypeStruct((1, h, 1, 1), jnp.float32)
    descriptor = te.SequenceDescriptor.from_seqlens(jnp.full((b,), 7))
    if layout.is_thd():
        places = jnp.zeros((b, given["segments"]), jnp.int32)
        descriptor = te.SequenceDescriptor.from_seqlens_and_offsets(places + 3, places)

    def attend(arrays, bias, offset):
        return te.fused_attn(
            arrays,
            bias,
            descriptor,
            jnp.zeros((2,), jnp.uint32),
            kind,
            given["mask"],
            layout,
            given["softmax"],
            given["scale"],
            given["dropout"],
            given["training"],
            given["segments"],
            given["window"],
            softmax_offset=offset,
        )

    def both(arrays, bias, offset):
        out, back = jax.vjp(attend, arrays, bias, offset)
        return out, back(out)

    return both, (arrays, bias, offset)


@pytest.fixture
def on_gpu(monkeypatch):
    """Lets programs be lowered as where there is an H100, whose cuDNN has all; the plans asked."""
    asked = []

    def planned(op, dtype, attributes):
        asked.append((op, dtype, dict(attributes)))
        return 1000, ""

    monkeypatch.setattr(ops, "has_backend", lambda platform: True)
    monkeypatch.setattr(ops, "register_kernel", lambda spec: spec.target)
    monkeypatch.setattr(_gpus, "used", lambda: {0: 90})
    monkeypatch.setattr(_cudnn, "loaded", lambda: (92800, ""))
    monkeypatch.setattr(_attention, "planned", planned)
    return asked


def lowered(monkeypatch, **changed):
    """What each op's kernel says of its call, and the program for GPUs."""
    reasons = {}

    def attention(call, asked=ASKED):
        reasons[call.op] = asked(call)
        return reasons[call.op]

    monkeypatch.setattr(_supports, "attention", attention)
    # A call that was traced or asked about before asks nothing again.
    jax.clear_caches()
    with installed_plugins():
        both, shapes = program(**changed)
        lines = jax.jit(both).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    return reasons, lines


@needs_native
@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({}, True),
        ({"dtype": jnp.float16}, True),
        ({"g": 2, "d": 128, "dv": 120}, True),
        ({"d": 256, "dv": 256}, True),
        ({"d": 192, "dv": 128}, "heads are of 192 and 128 numbers, which must be 128 at most"),
        ({"d": 264, "dv": 264}, "heads are of 264"),
        ({"d": 20, "dv": 20}, "heads are of 20 and 20 numbers, which must be multiples of 8"),
        ({"dtype": jnp.float32}, "q is float32"),
        ({"sq": 0}, "no queries, or no keys"),
        ({"bias": 2}, True),
        ({"bias": 1}, "before the scale"),
        ({"scale": -0.5}, "scaling_factor is -0.5"),
        ({"mask": 5, "window": (8, 0)}, True),
        ({"softmax": 2}, True),
        ({"layout": 14, "mask": 3, "segments": 4}, True),
        ({"dropout": 0.1}, True),
    ],
)
def test_what_they_take(monkeypatch, on_gpu, changed, part):
    reasons, text = lowered(monkeypatch, **changed)
    for op in OPS:
        assert reasons[op] is True if part is True else part in reasons[op]
        assert (f"@te_ffi_kernels.{op}" in text) == (part is True)


@needs_native
@pytest.mark.parametrize(
    ("capability", "changed", "part"),
    [
        (0, {}, "there is no NVIDIA GPU here"),
        (75, {}, "need a GPU of compute capability 8.0 or newer, and GPU 0 has 7.5"),
        (80, {}, True),
        (80, {"layout": 10, "mask": 1}, "compute capability 9.0 or 10.x, and one here has 8.0"),
        (100, {"layout": 12, "mask": 1}, True),
        (120, {"layout": 14, "mask": 1}, "and one here has 12.0"),
    ],
)
def test_which_gpus_they_need(monkeypatch, on_gpu, capability, changed, part):
    monkeypatch.setattr(_gpus, "used", lambda: {0: capability} if capability else {})
    reasons, _ = lowered(monkeypatch, **changed)
    assert all(reason is True if part is True else part in reason for reason in reasons.values())


@needs_native
def test_each_gpu_must_have_it(monkeypatch, on_gpu):
    monkeypatch.setattr(_gpus, "used", lambda: {0: 90, 1: 120, 2: 90})
    assert lowered(monkeypatch)[0] == dict.fromkeys(OPS, True)
    reasons, _ = lowered(monkeypatch, layout=14, mask=1)
    assert all("and one here has 12.0" in reason for reason in reasons.values())


def test_a_plan_is_made_for_each_kind_of_gpu(monkeypatch):
    asked = []

    class Native:
        def plan_attention(self, attributes, bfloat16, backward, device):
            asked.append(device)
            return (100, "") if device == 0 else (300, "not on this one")

    monkeypatch.setattr(_gpus, "used", lambda: {0: 90, 1: 90, 3: 100})
    monkeypatch.setattr(_attention, "native", Native)
    found = _attention.planned.__wrapped__(OPS[0], "bfloat16", ())
    assert found == (300, "not on this one")
    assert asked == [0, 3]


@needs_native
@pytest.mark.parametrize(
    ("found", "part"),
    [
        ((0, "no such file"), "cuDNN can't be loaded; install nvidia-cudnn-cu13 (no such file)"),
        ((90800, ""), "cuDNN is 9.8.0, and attention needs 9.16.0"),
        ((91600, ""), True),
    ],
)
def test_which_cudnn_they_need(monkeypatch, on_gpu, found, part):
    monkeypatch.setattr(_cudnn, "loaded", lambda: found)
    reasons, _ = lowered(monkeypatch)
    assert all(reason is True if part is True else part in reason for reason in reasons.values())


@needs_native
def test_what_cudnn_refuses_runs_as_plain_jax(monkeypatch, on_gpu):
    def planned(op, dtype, attributes):
        if op == OPS[1]:
            raise RuntimeError("starting cuDNN failed")
        return 0, "" if dtype == "bfloat16" else "not of float16"

    monkeypatch.setattr(_attention, "planned", planned)
    reasons, text = lowered(monkeypatch)
    assert reasons[OPS[0]] is True
    assert reasons[OPS[1]] == f"cuDNN 9.28.0 doesn't have {OPS[1]}: starting cuDNN failed"
    assert f"@te_ffi_kernels.{OPS[0]}" in text
    assert f"@te_ffi_kernels.{OPS[1]}" not in text
    # Both draw the same random words, or neither draws cuDNN's.
    reasons, text = lowered(monkeypatch, dropout=0.5)
    assert all("starting cuDNN failed" in reason for reason in reasons.values())
    assert "@te_ffi_kernels" not in text
    reasons, _ = lowered(monkeypatch, dropout=0.5, training=False)
    assert reasons[OPS[0]] is True
    reasons, _ = lowered(monkeypatch, dtype=jnp.float16)
    assert reasons[OPS[0]].endswith("fused_attn_forward: not of float16")


@needs_native
def test_gradients_of_offsets(monkeypatch, on_gpu):
    packed = {"layout": 14, "mask": 1, "softmax": 1}
    assert lowered(monkeypatch, **packed)[0] == dict.fromkeys(OPS, True)
    monkeypatch.setattr(_cudnn, "loaded", lambda: (92500, ""))
    reasons, _ = lowered(monkeypatch, **packed)
    assert reasons[OPS[0]] is True
    assert "before 9.26" in reasons[OPS[1]]
    assert lowered(monkeypatch, softmax=1)[0] == dict.fromkeys(OPS, True)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    reasons, _ = lowered(monkeypatch, softmax=1)
    assert reasons[OPS[0]] is True
    assert "sum in no order" in reasons[OPS[1]]
    assert lowered(monkeypatch)[0] == dict.fromkeys(OPS, True)


@needs_native
@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("", False),
        ("--xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true", True),
        ("--xla_gpu_exclude_nondeterministic_ops", True),
    ],
)
def test_it_is_as_deterministic_as_xla(monkeypatch, on_gpu, flags, wanted):
    monkeypatch.setenv("XLA_FLAGS", flags)
    lowered(monkeypatch)
    assert {attributes["deterministic"] for _, _, attributes in on_gpu} == {wanted}


@needs_native
def test_a_program_for_gpus_gives_them_memory(monkeypatch, on_gpu):
    _, text = lowered(monkeypatch, bias=2, mask=1, h=4, sq=64)
    found = re.findall(r"@te_ffi_kernels\.(\w+)\(.*tensor<(\d+)xui8>\)", text)
    lengths = 2 * 256
    # Backward has a copy of the log-sum-exp.
    assert {op: int(size) for op, size in found} == {
        OPS[0]: 256 + lengths + 1000,
        OPS[1]: 256 + lengths + 4 * 2 * 4 * 64 + 1000,
    }


@needs_native
def test_each_index_of_vmap_is_asked_about_with_its_batch(monkeypatch, on_gpu):
    both, (arrays, *_) = program()
    more = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in arrays]
    run = jax.jit(jax.vmap(lambda arrays: both(arrays, None, None)))
    text = run.trace(more).lower(lowering_platforms=("cuda",)).as_text()
    assert "@te_ffi_kernels.fused_attn_forward" in text
    assert on_gpu[-1][2]["input_batch"] == 6


@needs_native
def test_attributes_that_cannot_be():
    native = importlib.import_module("te_ffi_kernels_cuda13._native")
    with pytest.raises(RuntimeError, match="attribute input_batch is missing"):
        native.attention_workspace({}, False)
