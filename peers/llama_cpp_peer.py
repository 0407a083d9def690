"""llama.cpp beside jaxtap_llm: its files, from our parameters, and its server in this process.

Needs ``gguf`` and ``xllamacpp``, of the dependency group peers.
"""

import dataclasses
import json
import math

import gguf
import numpy as np
import xllamacpp

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
NAMES = {
    "attention_norm": ["attn_norm"],
    "qkv": ["attn_q", "attn_k", "attn_v"],
    "qkv_bias": ["attn_q", "attn_k", "attn_v"],
    "q_norm": ["attn_q_norm"],
    "k_norm": ["attn_k_norm"],
    "out": ["attn_output"],
    "attention_post_norm": ["post_attention_norm"],
    "mlp_norm": ["ffn_norm"],
    "mlp_post_norm": ["post_ffw_norm"],
    "router": ["ffn_gate_inp"],
    "gate_up": ["ffn_gate", "ffn_up"],
    "down": ["ffn_down"],
}


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
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.family])
    _write_fields(writer, config, context)
    (_write_bytes if vocabulary == "bytes" else _write_vocabulary)(writer, config.vocabulary)
    kind = gguf.GGMLQuantizationType[qtype]

    def add(name, array):
        array = np.ascontiguousarray(array, np.float32)
        if array.ndim < 2 or kind == gguf.GGMLQuantizationType.F32 or "gate_inp" in name:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)

    add("token_embd.weight", params["embed"])
    add("output_norm.weight", params["norm"])
    if not config.tied:
        add("output.weight", np.asarray(params["head"]).T)
    if config.ropes[0].llama3 is not None:
        plain = dataclasses.replace(config.ropes[0], factor=1.0, llama3=None)
        size = config.head_size
        add("rope_freqs.weight", plain.frequencies(size) / config.ropes[0].frequencies(size))
    for i in range(config.layers):
        for name, stack in params["layers"].items():
            for part, array in _parts(config, name, np.asarray(stack[i])):
                add(f"blk.{i}.{part}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _parts(config, name, array):
    """Yield what a parameter of one layer is in the file: ``[out, in]``, by name."""
    size = config.head_size
    ends = [config.heads * size, (config.heads + config.kv_heads) * size]
    ends = {"gate_up": [config.inner]}.get(name, ends if name.startswith("qkv") else [])
    suffix = "bias" if name.endswith("bias") else "weight"
    for part, one in zip(NAMES[name], np.split(array, ends, axis=-1), strict=True):
        one = one.swapaxes(-1, -2) if one.ndim > 1 else one
        if config.family == "llama" and part in ("attn_q", "attn_k"):
            # Its rotary pairs are neighbours: the halves of a head are interleaved.
            one = one.reshape(-1, 2, size // 2, one.shape[-1]).swapaxes(1, 2).reshape(one.shape)
        part += "_exps" if config.experts and name in ("gate_up", "down") else ""
        yield f"{part}.{suffix}", one


def _write_fields(writer, config, context):
    writer.add_context_length(context)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.inner)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_layer_norm_rms_eps(config.epsilon)
    writer.add_rope_freq_base(config.ropes[0].theta)
    if config.ropes[0].llama3 is None and config.ropes[0].factor != 1:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.ropes[0].factor)
    if any(config.windows):
        writer.add_sliding_window(max(config.windows))
    if config.softcap:
        writer.add_attn_logit_softcapping(config.softcap)
        writer.add_final_logit_softcapping(config.final_softcap)
    if config.experts:
        writer.add_expert_count(config.experts)
        writer.add_expert_used_count(config.experts_per_token)
        writer.add_expert_feed_forward_length(config.inner)


def _write_vocabulary(writer, size):
    """Write tokens for prompts of ids. Bytes are ASCII alone: of halves of a character the server
    tells nothing.
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(128))]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 128]
    tokens += [f"t{i}" for i in range(len(tokens), size)]
    kinds += [gguf.TokenType.NORMAL] * (size - len(kinds))
    _write_tokens(writer, tokens, kinds)


def _write_bytes(writer, size):
    """Write a vocabulary in which each byte is the token of its number."""
    tokens = [f"<0x{i:02X}>" for i in range(size)]
    kinds = [gguf.TokenType.BYTE] * size
    tokens[ord(" ")], kinds[ord(" ")] = "\u2581", gguf.TokenType.NORMAL  # what it makes of a space
    _write_tokens(writer, tokens, kinds)


def _write_tokens(writer, tokens, kinds):
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)


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
