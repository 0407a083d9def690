"""Bundles of ``jaxtap llm device`` in LiteRT-LM's own runtime.

The runtime is a separate process: it and ai-edge-litert hold two builds of one library.
"""

import json
import subprocess
import sys

import jax.numpy as jnp
import pytest

from jaxtap_llm import checkpoint, device
from jaxtap_llm.bundle import Bundle
from jaxtap_llm.fields import parse_config
from jaxtap_llm.rules import DEVICE
from jaxtap_testkit.llm_samples import fields_of, varied

RUN = """
import json, sys, litert_lm
path, text = sys.argv[1:]
OPTIONS = {"enable_benchmark": True}
with litert_lm.Engine(path, backend=litert_lm.Backend.CPU(thread_count=2), **OPTIONS) as engine:
    greedy = litert_lm.SamplerConfig(top_k=1, top_p=1.0, temperature=1.0)
    with engine.create_session(apply_prompt_template=False, sampler_config=greedy) as session:
        session.run_prefill([text])
        found = session.run_decode().texts[0]
        speed = session.get_benchmark_info()
    print("FOUND", json.dumps({"tokens": engine.tokenize(text), "text": found, "speed": [
        speed.last_prefill_tokens_per_second, speed.last_decode_tokens_per_second]}))
"""
PROMPT, POSITIONS = 8, 48


def run(path, text):
    """What LiteRT-LM generates behind a text, and how fast."""
    command = [sys.executable, "-c", RUN, str(path), text]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return json.loads(out.stdout.decode().partition("FOUND ")[2])


@pytest.mark.parametrize("name", DEVICE)
def test_the_same_text_as_litert(name, tmp_path):
    """A prompt of several prefills, the last of them padded."""
    fields = fields_of("llama") | {"num_hidden_layers": 2}
    config = parse_config(fields)
    params = varied(checkpoint.init(config))
    # The runtime's texts are C strings: the byte 0 would end one, and is never the likeliest so.
    params["head"] = params["head"] * (jnp.arange(256) > 0)
    made = device.export(config, params, name, PROMPT, POSITIONS)
    text = "LiteRT-LM reads bytes"
    ids = list(text.encode())
    runs, cache = device.Device(made.model), None
    for position, token in enumerate(ids):
        logits, cache = runs.decode(token, cache or runs.prefill(ids[:1])[1], position)
    tokens = []
    for position in range(len(ids), POSITIONS):  # where LiteRT-LM ends, too
        tokens.append(int(logits.argmax()))
        logits, cache = runs.decode(tokens[-1], cache, position)
    unused = min(set(range(256)) - set(tokens))
    (tmp_path / "config.json").write_text(f'{{"eos_token_id": {unused}}}')
    Bundle(tmp_path, POSITIONS).write(tmp_path / "model.litertlm", made.model)
    found = run(tmp_path / "model.litertlm", text)
    assert found["tokens"] == ids
    print(f"{name}: prefill {found['speed'][0]:.0f}, decode {found['speed'][1]:.0f} tokens/s")
    assert found["text"] == bytes(tokens).decode(errors="replace")
