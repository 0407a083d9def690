"""From a file of llama2.c to a Hugging Face folder, for ``bits --own-text``.

uv run python -m benchmarks.language_models.llama2c stories260K.bin FOLDER

The format is that of karpathy/llama2.c's first version: seven int32 (width, inner width, layers,
heads, heads of keys, vocabulary, longest text; a vocabulary below 0 says that the head has weights
of its own), then float32, each kind of matrix for all layers, as ``[out, in]``. The folder has no
tokenizer: a model that writes its own text needs none.
"""

import argparse
import json
import struct
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HEADER = struct.Struct("<7i")


def convert(source, folder):
    """Write ``config.json`` and ``model.safetensors`` of a file into a folder, which is made."""
    data = Path(source).read_bytes()
    dim, inner, layers, heads, kv_heads, vocabulary, length = HEADER.unpack_from(data)
    numbers = np.frombuffer(data, "<f4", offset=HEADER.size)
    size, kv = dim // heads, dim // heads * kv_heads
    place = 0

    def take(*shape):
        nonlocal place
        place += int(np.prod(shape))
        if place > numbers.size:
            raise ValueError(
                f"{source} must have {place} numbers or more by its header, got {numbers.size}. "
                "Take a file of llama2.c's first version."
            )
        return numbers[place - int(np.prod(shape)) : place].reshape(shape)

    def halves(w):
        """Return rows of queries or keys as Hugging Face turns them: halves, not neighbours."""
        rows, columns = w.shape
        return w.reshape(-1, size // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)

    found = {"model.embed_tokens.weight": take(abs(vocabulary), dim)}
    for name, shape in (
        ("input_layernorm", (dim,)),
        ("self_attn.q_proj", (dim, dim)),
        ("self_attn.k_proj", (kv, dim)),
        ("self_attn.v_proj", (kv, dim)),
        ("self_attn.o_proj", (dim, dim)),
        ("post_attention_layernorm", (dim,)),
        ("mlp.gate_proj", (inner, dim)),
        ("mlp.down_proj", (dim, inner)),
        ("mlp.up_proj", (inner, dim)),
    ):
        turned = name.endswith(("q_proj", "k_proj"))
        for i, w in enumerate(take(layers, *shape)):
            found[f"model.layers.{i}.{name}.weight"] = halves(w) if turned else w
    found["model.norm.weight"] = take(dim)
    take(2, length, size // 2)  # cosines and sines, which a config says
    if vocabulary < 0:
        found["lm_head.weight"] = take(-vocabulary, dim)
    fields = {
        "model_type": "llama",
        "vocab_size": abs(vocabulary),
        "hidden_size": dim,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": vocabulary > 0,
    }
    folder = Path(folder)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    save_file(
        {name: np.ascontiguousarray(w) for name, w in found.items()}, folder / "model.safetensors"
    )


def main():
    """Convert what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a .bin of llama2.c")
    parser.add_argument("folder", type=Path, help="a folder that is made")
    given = parser.parse_args()
    convert(given.source, given.folder)


if __name__ == "__main__":
    main()
