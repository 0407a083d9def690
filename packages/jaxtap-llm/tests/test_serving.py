"""Exported language models of jaxtap_llm: programs and packed parameters, in a fresh process."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interception_core import JaxtapError
from jaxtap_llm import checkpoint, folders, quantized, serving
from jaxtap_llm.config import LlmError
from jaxtap_llm.fields import parse_config
from jaxtap_llm.generate import Generator, Sampling
from jaxtap_testkit.llm_samples import fields_of, run_llm, varied
from jaxtap_testkit.processes import run_python


def a_quantized(tmp_path, family="llama", rules="int4"):
    config = parse_config(fields_of(family))
    folder, out = tmp_path / "float", tmp_path / "out"
    checkpoint.write(folder, fields_of(family), config, varied(checkpoint.init(config)))
    quantized.quantize(folder, out, rules)
    return out


def tokens_of(generator, prompt, count=20, **options):
    return np.concatenate(list(generator.stream(prompt, count, **options)), axis=1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "rules", "dtype", "cache"),
    [
        ("llama", "int4", "float32", "float"),
        pytest.param("qwen3_moe", "int8", "bfloat16", "float", marks=pytest.mark.slow),
        pytest.param("gemma3_text", "w8a8", "float32", "int8", marks=pytest.mark.slow),
        pytest.param("qwen2", "float", "bfloat16", "int8", marks=pytest.mark.slow),
    ],
)
def test_an_exported_model_generates_the_same(tmp_path, family, rules, dtype, cache):
    out = a_quantized(tmp_path, family, rules)
    config, plan, params = folders.load(out, dtype)
    made = Generator(config, params, plan, jnp.dtype(dtype), cache)
    serving.export(out, tmp_path / "programs", made, plan, prompt=16, positions=64)
    served = serving.Exported(tmp_path / "programs")
    jax.tree.map(np.testing.assert_array_equal, served.params, params)
    for length in (1, 16):
        prompt = np.random.default_rng(length).integers(0, 256, (1, length))
        for sampling in (Sampling(), Sampling(0.8, top_k=9)):
            options = {"sampling": sampling, "seed": 3, "positions": 64}
            assert tokens_of(served, prompt, **options) == tokens_of(made, prompt, **options)
    with pytest.raises(LlmError, match="at most 16 tokens, which the programs were exported for"):
        tokens_of(served, np.zeros((1, 17), int))
    with pytest.raises(LlmError, match="must fit into the 64 positions that the"):
        tokens_of(served, np.zeros((1, 3), int), 62)
    with pytest.raises(LlmError, match="for one sequence and a cache of 64 positions, got 2"):
        tokens_of(served, np.zeros((2, 3), int))


@pytest.mark.slow
def test_bfloat16_is_as_near_as_in_float_and_stores_the_same(tmp_path, capsys):
    out = a_quantized(tmp_path)
    tokens = np.random.default_rng(2).integers(0, 256, (1, 12))
    floats = checkpoint.read(tmp_path / "float")[1]
    logits, packed = {}, {}
    for dtype in ("float32", "bfloat16"):
        config, plan, params = folders.load(out, dtype)
        layers = params["layers"]
        assert layers["qkv"].dtype == layers["attention_norm"].dtype == dtype
        packed[dtype] = jax.tree.leaves(layers["qkv"])
        rounded = jax.tree.map(lambda x, dtype=dtype: jnp.asarray(x, dtype), floats)
        for name, made in (
            ("int4", Generator(config, params, plan, jnp.dtype(dtype))),
            ("float", Generator(config, rounded, None, jnp.dtype(dtype))),
        ):
            cache = made.make_cache(1, 16)
            assert cache["k"].dtype == dtype
            logits[name, dtype] = made._prefill(made.params, tokens, cache, 11)[0]
    jax.tree.map(np.testing.assert_array_equal, packed["float32"], packed["bfloat16"])
    errors = {
        name: np.linalg.norm(logits[name, "bfloat16"] - logits[name, "float32"])
        for name in ("int4", "float")
    }
    assert 0 < errors["int4"] < 2.5 * errors["float"]
    text = tmp_path / "text"
    text.write_text("It was a dark night. " * 2)
    found = []
    for options in ([], ["--cache", "float"], ["--cache", "int8"]):
        run_llm("perplexity", str(out), str(text), "--dtype", "bfloat16", *options)
        found.append(float(capsys.readouterr().out.split()[1]))
    np.testing.assert_allclose(found, found[0], rtol=0.1)


def test_a_fresh_process_and_its_errors(tmp_path, capsys):
    out, programs = a_quantized(tmp_path), tmp_path / "programs"
    options = ["--prompt", "16", "--positions", "64"]
    run_llm("export", out, programs, *options)
    run_llm("generate", out, "--prompt", "abc", "--count", 9)
    text = capsys.readouterr().out.splitlines()[-1]
    (tmp_path / "serve.py").write_text(
        "import sys\n"
        "from jaxtap_testkit.llm_samples import run_llm as main\n"
        "main('generate', sys.argv[1], '--prompt', 'abc', '--count', '9')\n"
        # Nothing is planned, and no model is traced.
        "assert 'provider_xla.plan.plan' not in sys.modules\n"
    )
    run = run_python(tmp_path / "serve.py", programs)
    assert run.stdout.splitlines() == [text]

    def refused(*args):
        with pytest.raises(JaxtapError) as error:
            run_llm(*args)
        return str(error.value)

    generate = ["generate", programs, "--prompt", "abc"]
    assert "--cache and --dtype are export's" in refused(*generate, "--cache", "int8")
    assert "leave --context out" in refused(*generate, "--context", 96, "--count", 9)
    assert "must be a folder that is not there" in refused("export", out, programs)
    small = ["--prompt", "64", "--positions", "64"]
    assert "below --positions, got 64 and 64" in refused("export", out, tmp_path / "b", *small)
    assert "must have model.safetensors" in refused("export", programs, tmp_path / "b")
    assert not (tmp_path / "b").exists()
    assert [path.name for path in tmp_path.glob("b.*")] == []
    first = sorted((programs / serving.PARAMETERS).glob("*.npy"))[0]
    whole = first.read_bytes()
    first.write_bytes(whole[:90])
    assert "must be what export wrote" in refused(*generate)
    np.save(first, np.zeros(3, np.uint8).view("V1"))
    assert "It is another model's" in refused(*generate)
    first.unlink()
    assert "must be what export wrote" in refused(*generate)
    first.write_bytes(whole)
    (programs / "step.program").write_bytes(b"x")
    assert "must be a file that plan.export" in refused(*generate)
    for wrong in ("{", json.dumps({"prompt": 4})):
        (programs / serving.FACTS).write_text(wrong)
        assert "must be what export wrote" in refused(*generate)
