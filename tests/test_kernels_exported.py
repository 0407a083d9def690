"""plan.export with te-ffi-kernels: what a fresh process loads, and what it is told."""

import dataclasses

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import provider_xla as xla
import te_ffi_kernels as te
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.processes import run_python

RULES = [
    xla.QuantizationRule(weight_path=r".*(up|experts).*", weight_qtype="int8", act_qtype="int8"),
    xla.QuantizationRule(weight_path=r".*down.*", weight_qtype="int4", tile_size=32),
    xla.QuantizationRule(weight_qtype="int8"),
]
D, VOCABULARY, LAYERS = 64, 48, 2


def decoder(params, tokens):
    """Lookups, a scan over layers, weights that are sliced and derived, and a tied head."""
    x = params["table"][tokens]

    def layer(x, p):
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    x, _ = lax.scan(layer, x, params["layers"])
    q, k = jnp.split(x @ params["both"], 2, axis=-1)
    x = q + k + x @ (params["kept"] * params["mask"])
    return x @ params["table"].T


def parameters():
    rng = np.random.default_rng(0)
    shapes = {
        "table": (VOCABULARY, D),
        "both": (D, 2 * D),
        "kept": (D, D),
        "layers": {"up": (LAYERS, D, 2 * D), "down": (LAYERS, 2 * D, D)},
    }
    is_shape = {"is_leaf": lambda x: isinstance(x, tuple)}
    params = jax.tree.map(
        lambda s: jnp.asarray(rng.normal(size=s) / 8, "float32"), shapes, **is_shape
    )
    return params | {"mask": jnp.asarray(rng.random((D, D)) < 0.5, "float32")}


TOKENS = np.arange(15).reshape(3, 5) % VOCABULARY
SERVER = """
import sys
from pathlib import Path
folder = sys.argv[1]
import jax, jax.export, numpy as np, te_ffi_kernels as te
# The kernels need te.register() alone.
te.register()
plain = jax.export.deserialize(bytearray(Path(folder, "plain").read_bytes()))
print(plain.call(np.zeros((2, 5), np.int32)).shape)

import provider_xla as xla
program = xla.load_exported(folder + "/program")
inside = xla.load_exported(folder + "/inside")
stored = program.parameters(xla.load(folder + "/parameters.safetensors"))
wanted = np.load(folder + "/wanted.npz")
for name, tokens in (("3", wanted["tokens"]), ("1", wanted["tokens"][:1])):
    ready = program.compile(stored, tokens)
    for found in (program(stored, tokens), ready(stored, tokens), inside(tokens)):
        np.testing.assert_allclose(found, wanted[name], atol=2e-5)
print(program)
"""
REFUSED = """
import sys, numpy as np, provider_xla as xla, quant_numerics as qn
for path in sys.argv[1:]:
    try:
        xla.load_exported(path)
    except xla.StoreError as error:
        print(error, end="; ")
    try:
        xla.load_exported(path, check_versions=False)
        print("loaded")
    except xla.StoreError as error:
        print("refused")
w = np.ones((32, 16), np.float32)
plan = xla.PtqProvider().plan(lambda w, x: x @ w, w, w.T)
print(plan.ops[0].kernel, plan.ops[0].kernel_reason, isinstance(plan.quantize(w), qn.QArray))
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The plan, its parameters, and a folder with its programs."""
    params = parameters()
    plan = xla.PtqProvider(RULES).plan(decoder, params, TOKENS)
    stored = plan.quantize(params)
    folder = tmp_path_factory.mktemp("exported")
    program = plan.export(stored, TOKENS, shapes="b, ...")
    program.save(folder / "program")
    plan.export(stored, TOKENS, shapes="b, ...", inside=True).save(folder / "inside")
    xla.save(folder / "parameters.safetensors", stored, plan)
    return plan, stored, program, folder


def test_a_fresh_process_serves_any_batch(exported):
    plan, stored, program, folder = exported
    assert set(program.kernels) == {
        f"te_ffi_kernels.{op}" for op in ("gemm_w8a8", "gemm_w4a16", "gemm_w8a16", "packed_take")
    }
    # The kernels themselves, one call of each: their results are tested against NumPy elsewhere.
    run = jax.jit(plan.apply(decoder))
    wanted = {str(n): np.asarray(run(stored, TOKENS[:n])) for n in (3, 1)}
    in_float = decoder(parameters(), TOKENS)
    error = np.linalg.norm(wanted["3"] - in_float) / np.linalg.norm(in_float)
    assert error < 0.1
    np.savez(folder / "wanted.npz", tokens=TOKENS, **wanted)
    text = xla.load_exported(folder / "inside").exported.serialize()
    (folder / "plain").write_bytes(text)
    printed = run_python("-c", SERVER, folder).stdout
    assert printed.startswith("(2, 5, 48)\n")
    assert "te-ffi-kernels" in printed
    assert "int32[b,5]" in printed or "int64[b,5]" in printed


def test_platforms_without_a_backend_here(exported):
    plan, stored, *_ = exported
    both = plan.export(stored, TOKENS, platforms=("cpu", "cuda"))
    assert both.exported.platforms == ("cpu", "cuda")
    np.testing.assert_array_equal(
        both(stored, TOKENS), jax.jit(plan.apply(decoder))(stored, TOKENS)
    )
    other = plan.export(stored, TOKENS, platforms=("cuda",))
    assert not other.kernels
    with pytest.raises(xla.StoreError, match=r"must be exported for cpu.*got one for cuda.*Export"):
        other(stored, TOKENS)


def test_portable_parameters_are_packed_for_the_program(exported):
    plan, stored, program, _ = exported
    portable = plan.convert(stored)
    found = program.parameters(portable)
    assert jax.tree.structure(found) == jax.tree.structure(stored)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(stored), strict=True):
        np.testing.assert_array_equal(a, b)
    float_scales = plan.export(portable, TOKENS)
    back = float_scales.parameters(stored)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(portable), strict=True):
        np.testing.assert_array_equal(a, b)


def test_parameters_of_another_program(exported):
    _, stored, program, _ = exported
    with pytest.raises(xla.StoreError, match=r"must be a tree like that of the program"):
        program.parameters({"table": stored["table"]})
    with pytest.raises(xla.StoreError, match=r"\['both'\] must be a PrepackedWeight of int8.*got"):
        program.parameters(stored | {"both": jnp.zeros((D, 2 * D))})


def test_kernels_that_are_not_there(exported, tmp_path):
    """A program is refused then, and plans are as without the package."""
    *_, program, _ = exported
    kernels = dict(program.kernels)
    one = next(iter(kernels.values()))
    missing = kernels | {
        "acme.gemm": dataclasses.replace(one, package="acme-kernels", version="3.1")
    }
    older = {k: dataclasses.replace(v, version="0.0.1") for k, v in kernels.items()}
    paths = []
    for i, made in enumerate((kernels, missing, older)):
        paths.append(tmp_path / f"program {i}")
        dataclasses.replace(program, kernels=made).save(paths[-1])
    environment = {"JAXTAP_DISABLE_PLUGINS": "te-ffi-kernels"}
    disabled, plan = run_python(
        "-c", REFUSED, paths[0], strict=False, **environment
    ).stdout.splitlines()
    assert plan == (
        "None no kernel for cpu is installed: install te-ffi-kernels (Disabled by "
        "JAXTAP_DISABLE_PLUGINS: te-ffi-kernels) True"
    )
    for text in ("te-ffi-kernels", "is disabled", "refused"):
        assert text in disabled
    for path, texts in (
        (paths[1], ["acme-kernels 3.1 (acme.gemm), which is not installed"]),
        (paths[2], ["te-ffi-kernels must be version 0.0.1", "got"]),
    ):
        with pytest.raises(xla.StoreError) as error:
            xla.load_exported(path)
        assert all(text in str(error.value) for text in texts), error
    with pytest.raises(xla.StoreError):
        xla.load_exported(paths[1], check_versions=False)
    xla.load_exported(paths[2], check_versions=False)


def test_damaged_and_other_files(exported, tmp_path):
    *_, program, folder = exported
    text = bytearray((folder / "program").read_bytes())
    with pytest.raises(xla.StoreError, match=r"must be a file that plan.export"):
        xla.load_exported(folder / "parameters.safetensors")
    with pytest.raises(xla.StoreError, match=r"must be a file that can be read"):
        xla.load_exported(tmp_path / "none")
    for at in (20, 60, 200, len(text) // 2, len(text) - 1):
        altered = bytearray(text)
        altered[at] ^= 1
        with pytest.raises(xla.StoreError, match=r"is corrupted"):
            xla.load_exported(bytes(altered))
    with pytest.raises(xla.StoreError, match=r"already exists"):
        program.save(folder / "program")
    assert (folder / "program").read_bytes() == text


def test_programs_that_do_not_hold_for_every_size():
    def model(w, x):
        return (x @ w).reshape(3, -1)

    w, x = jnp.ones((32, 32)), jnp.ones((4, 3, 32))
    plan = xla.PtqProvider(xla.QuantizationRule(weight_qtype="int8")).plan(model, w, x)
    stored = plan.quantize(w)
    with pytest.raises(
        xla.QuantizationError, match=r"model must hold for every size.*shapes='b, c"
    ):
        plan.export(stored, x, shapes="b, c, 32")
    assert plan.export(stored, x)(stored, x).shape == (3, 128)


def test_other_ops_hold_for_all_sizes_without_their_kernels():
    """Where a kernel needs sizes, its reference is exported for symbolic ones."""
    (b,) = jax.export.symbolic_shape("b")
    qvalue = jnp.ones((32, 16), jnp.int8)
    w = te.pack_w8(qvalue, jnp.ones((1, 16)))

    def both(x, gamma):
        return te.gemm_w8a8(x, w), te.layernorm(x, gamma, jnp.zeros(32))

    x, gamma = normal(4, 32), jnp.ones(32)
    typed = jax.ShapeDtypeStruct((b, 32), jnp.float32)
    exported = jax.export.export(jax.jit(both), disabled_checks=te.export_checks())(typed, gamma)
    assert "te_ffi_kernels.gemm_w8a8" in exported.mlir_module()
    assert "te_ffi_kernels.norm_forward" not in exported.mlir_module()
    contraction, norm = exported.call(x, gamma)
    np.testing.assert_array_equal(contraction, te.gemm_w8a8(x, w))
    centred = np.asarray(x, "float64") - np.asarray(x, "float64").mean(-1, keepdims=True)
    wanted = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(norm, wanted, atol=1e-5)


def projected(w, x):
    return jnp.split((x @ w).reshape(*x.shape[:2], 6, 4), 3, 2)


def attends(**given):
    """Attention of the framework's function, with arguments that are computed from x."""

    def model(w, x):
        options = {name: of(x) if callable(of) else of for name, of in given.items()}
        return jax.nn.dot_product_attention(*projected(w, x), **options)

    return model


def written_out(mask):
    def model(w, x):
        q, k, v = projected(w, x)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
        if mask is not None:
            scores = jnp.where(mask(x), scores, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    return model


def as_matmuls(w, x):
    q, k, v = (part.swapaxes(1, 2) for part in projected(w, x))
    return jax.nn.softmax(q @ k.swapaxes(2, 3) / 2) @ v


def causal(x):
    return jnp.tri(x.shape[1], dtype=bool)


def looped(w, x):
    step = lambda x, _: (x + attends()(w, x).reshape(x.shape), None)  # noqa: E731
    return jax.lax.scan(step, x, None, 2)[0]


ANY_SIZE = {
    "attention": attends(),
    "causal": attends(is_causal=True),
    "masked": attends(mask=lambda x: (x[..., 0] > 0)[:, None, None] | causal(x)),
    "biased": attends(bias=lambda x: jnp.zeros((1, 2, x.shape[1], x.shape[1]))),
    "of lengths": attends(key_value_seq_lengths=lambda x: jnp.full(x.shape[0], 2, jnp.int32)),
    "few queries": lambda w, x: jax.nn.dot_product_attention(
        projected(w, x)[0][:, :1], *projected(w, x)[1:]
    ),
    "written out": written_out(None),
    "written out, causal": written_out(causal),
    "written out, masked": written_out(lambda x: (x[..., 0] > -9)[:, None, None]),
    "matmuls": as_matmuls,
    "in jit": lambda w, x: jax.jit(attends())(w, x),
    "in a loop": looped,
    "in vmap": lambda w, x: jax.vmap(lambda x: attends()(w, x[None])[0])(x),
    "softmax": lambda w, x: jax.nn.softmax(x @ w, axis=1),
    "softmax of vectors": lambda w, x: jax.vmap(jax.vmap(jax.nn.softmax))(x @ w),
    "norm": lambda w, x: jax.nn.standardize(x @ w) * w[0] + w[1],
    "activations": lambda w, x: jax.nn.silu(x @ w) * jax.nn.gelu(x @ w),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shapes", "sizes"), [("b, ...", [(3, 4)]), ("b, t, ...", [(1, 1), (2, 9)])]
)
def test_fused_functions_of_any_batch_and_length(shapes, sizes):
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((8, 24), (2, 4, 8)))

    def model(weights, x):
        return {name: fn(weights[name], x) for name, fn in ANY_SIZE.items()}

    rules = [xla.QuantizationRule(kernel="fused"), xla.QuantizationRule(weight_qtype="int8")]
    params = dict.fromkeys(ANY_SIZE, w)
    plan = xla.PtqProvider(rules).plan(model, params, x)
    stored = plan.quantize(params)
    run = jax.jit(plan.apply(model))
    program = plan.export(stored, x, shapes=shapes)
    for size in sizes:
        given = jnp.asarray(rng.normal(size=(*size, 8)), jnp.float32)
        found, wanted = program(stored, given), run(stored, given)
        for name in ANY_SIZE:
            np.testing.assert_allclose(found[name], wanted[name], atol=1e-3, err_msg=name)
