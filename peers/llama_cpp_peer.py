"""llama.cpp beside jaxtap_llm: its files, from our parameters, and its server in this process.

Needs ``xllamacpp``, of the dependency group peers.
"""

import json
import math

import numpy as np
import xllamacpp

from jaxtap_llm import checkpoint, gguf
from jaxtap_llm.vocabulary import of_bytes


def write_gguf(path, config, params, qtype="F32", context=4096, vocabulary="ids"):
    """Write a file of llama.cpp: matrices in ``qtype``, norms and biases in float32.

    Args:
        path: of the file.
        config: of the model.
        params: its parameters, float.
        qtype: of matrices.
        context: positions that the file names.
        vocabulary: ``"ids"`` for prompts of ids; ``"bytes"`` for text in ASCII whose bytes are
            the tokens of the model.
    """
    form = qtype.lower()
    about = gguf.metadata(config, {"max_position_embeddings": context}, form)
    about |= of_bytes() if vocabulary == "bytes" else of_ids(config.vocabulary)

    def get(name, layer):
        return np.asarray(checkpoint.parameter(config, params, name, layer)[1])

    gguf.write(path, config, get, about, form)


def of_ids(size):
    """Return the keys of tokens for prompts of ids. Bytes are ASCII alone: of halves of a character
    the server tells nothing.
    """
    names = [*("<unk>", "<s>", "</s>"), *(f"<0x{i:02X}>" for i in range(128))]
    kinds = [2, 3, 3, *[6] * 128]  # unknown, control, bytes; the others are normal
    names += [f"t{i}" for i in range(len(names), size)]
    kinds += [1] * (size - len(kinds))
    return of_bytes() | {
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.scores": np.zeros(size, np.float32),
    }


class Llama:
    """llama.cpp on the CPU with one file.

    Args:
        context: positions of the cache, of each sequence.
        cache: type of keys and values; in F32 also attention is in float32.
        threads: of prefill and of decoding.
        sequences: that are decoded at once.
    """

    def __init__(self, path, context=512, threads=2, sequences=1, cache="F16"):
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel = context * sequences, sequences
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache}")
        params.cache_type_k = params.cache_type_v = kind
        if cache == "F32":
            disabled = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            params.flash_attn_type = disabled
        params.n_batch = params.n_ubatch = 512
        params.cache_prompt = False
        params.cache_ram_mib = 0
        params.verbosity = -1
        self.server = xllamacpp.Server(params)

    def complete(self, tokens, **options):
        """Return the server's answer to a prompt of ids."""
        asked = {"prompt": list(map(int, tokens)), "temperature": 0.0, "cache_prompt": False}
        asked |= {"ignore_eos": True, "return_tokens": True, **options}
        answer = self.server.handle_completions(asked)
        return json.loads(answer) if isinstance(answer, str) else answer

    def log_probabilities(self, tokens, vocabulary):
        """Return float64 ``[vocabulary]``, of the token behind a prompt."""
        answer = self.complete(tokens, n_predict=1, n_probs=vocabulary)
        (place,) = answer["choices"][0]["logprobs"]["content"]
        found = np.full(vocabulary, -math.inf)
        for one in place["top_logprobs"]:
            found[one["id"]] = one["logprob"]
        return found
