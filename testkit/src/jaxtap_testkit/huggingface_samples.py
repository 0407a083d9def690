"""Folders of Hugging Face as their formats are described, written with NumPy and loops."""

import json

import jax.numpy as jnp
import numpy as np

SHORT = {"int8": "I8", "int32": "I32", "int64": "I64", "float32": "F32", "float16": "F16"}
SHORT |= {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "uint8": "U8", "int16": "I16"}
SHORT |= {"float8_e8m0fnu": "F8_E8M0"}


def words(row, bits):
    """A row of unsigned numbers as one large integer, cut into words of 32 bits."""
    whole = sum(int(number) << (i * bits) for i, number in enumerate(row))
    count = -(-len(row) * bits // 32)
    found = [(whole >> (32 * i)) & 0xFFFFFFFF for i in range(count)]
    return np.asarray(found, np.uint32).view(np.int32)


def packed(values, bits):
    return np.stack([words(row + 2 ** (bits - 1), bits) for row in values.astype(np.int64)])


def write_folder(folder, tensors, config, parts=1):
    """Write a config.json, and tensors in one or more safetensors files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    files = {f"model-{i + 1:05}-of-{parts:05}.safetensors": names[i::parts] for i in range(parts)}
    if parts == 1:
        files = {"model.safetensors": names}
    else:
        index = {"weight_map": {name: file for file, own in files.items() for name in own}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, own in files.items():
        header, body = {}, b""
        for name in own:
            array = np.ascontiguousarray(tensors[name])
            offsets = [len(body), len(body) + array.nbytes]
            dtype, shape = SHORT[array.dtype.name], list(np.shape(tensors[name]))
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            body += array.tobytes()
        text = json.dumps(header).encode()
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + body)


class Written:
    """A weight [out, in] that a method quantized: its tensors, and the numbers that they mean.

    Each function draws one. Numbers are float64 of what the format's own library computes before
    it rounds to the dtype of a model.
    """

    def __init__(self, config, tensors, numbers):
        self.config, self.tensors, self.numbers = config, tensors, numbers

    def folder(self, folder, module="model.layers.0.mlp.up_proj", **tensors):
        written = {f"{module}{end}": array for end, array in self.tensors.items()}
        write_folder(folder, written | tensors, {"quantization_config": self.config})


def _scales(rng, *shape):
    return rng.uniform(0.01, 0.1, shape).astype(np.float16)


def gptq(n=48, k=64, bits=4, group=32, symmetric=True, desc_act=False, form="gptq", seed=0):
    """AutoGPTQ's: rows in words, zero points less 1."""
    rng, groups = np.random.default_rng(seed), k // group
    values = rng.integers(0, 2**bits, (k, n))
    half = 2 ** (bits - 1)
    points = np.full((groups, n), half) if symmetric else rng.integers(0, 2**bits, (groups, n))
    columns = np.arange(k) // group
    if desc_act:
        columns = rng.permutation(columns)
    scale = _scales(rng, groups, n)
    stored = (points - (form == "gptq")) % 2**bits
    tensors = {
        ".qweight": np.stack([words(column, bits) for column in values.T], axis=1),
        ".qzeros": np.stack([words(row, bits) for row in stored]),
        ".scales": scale,
        ".g_idx": columns.astype(np.int32),
    }
    numbers = (values - points[columns]) * scale.astype(np.float64)[columns]
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act}
    config |= {"sym": symmetric, "checkpoint_format": form}
    return Written(config, tensors, numbers.T)


def awq(n=48, k=64, group=32, seed=0):
    """AutoAWQ's for its gemm: columns in words, in another order."""
    rng, groups = np.random.default_rng(seed), k // group
    values, points = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (groups, n))
    scale = _scales(rng, groups, n)

    def in_words(rows):
        found = np.zeros((rows.shape[0], n // 8), np.uint32)
        for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            found |= rows[:, column::8].astype(np.uint32) << (4 * place)
        return found.view(np.int32)

    tensors = {".qweight": in_words(values), ".qzeros": in_words(points), ".scales": scale}
    numbers = (values - np.repeat(points, group, 0)) * np.repeat(scale.astype(float), group, 0)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return Written(config | {"zero_point": True}, tensors, numbers.T)


def float8(n=200, k=300, block=(128, 128), seed=0):
    """DeepSeek's: a factor for each block; the last ones are smaller."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(n, k)).astype(jnp.float8_e4m3fn)
    scale = rng.uniform(1e-3, 1e-2, (-(-n // block[0]), -(-k // block[1]))).astype(np.float32)
    each = np.repeat(np.repeat(scale.astype(float), block[0], 0), block[1], 1)[:n, :k]
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    config |= {"weight_block_size": list(block)}
    tensors = {".weight": values, ".weight_scale_inv": scale}
    return Written(config, tensors, values.astype(np.float64) * each)


FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def mxfp4(experts=3, n=40, k=64, seed=0):
    """gpt-oss's experts."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (experts, n, k // 32, 32))
    exponents = rng.integers(120, 130, (experts, n, k // 32)).astype(np.uint8)
    blocks = (codes[..., ::2] + 16 * codes[..., 1::2]).astype(np.uint8)
    numbers = np.asarray(FLOAT4)[codes] * 2.0 ** (exponents.astype(float) - 127)[..., None]
    tensors = {"_blocks": blocks, "_scales": exponents}
    return Written({"quant_method": "mxfp4"}, tensors, numbers.reshape(experts, n, k))


NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
       0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
       0.7229568362236023, 1.0)  # fmt: skip


def bitsandbytes(n=48, k=128, kind="nf4", nested=False, dtype="bfloat16", seed=0):
    """bitsandbytes' 4 bits in blocks of 64."""
    rng, block = np.random.default_rng(seed), 64
    codes = rng.integers(0, 16, n * k)
    table = np.asarray(NF4 if kind == "nf4" else FLOAT4, np.float32)
    count = -(-n * k // block)
    state = {"quant_type": kind, "blocksize": block, "dtype": dtype, "shape": [n, k]}
    tensors = {
        ".weight": (16 * codes[::2] + codes[1::2]).astype(np.uint8)[:, None],
        ".weight.quant_map": table,
    }
    if nested:
        most = rng.integers(0, 256, count).astype(np.uint8)
        values = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        of_most = rng.uniform(0.01, 0.05, -(-count // 256)).astype(np.float32)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0625}
        tensors |= {".weight.nested_absmax": of_most, ".weight.nested_quant_map": values}
        scale = values.astype(float)[most] * np.repeat(of_most, 256)[:count] + 0.0625
    else:
        most = rng.uniform(0.01, 0.1, count).astype(np.float32)
        scale = most.astype(float)
    text = json.dumps(state).encode()
    tensors[".weight.absmax"] = most
    tensors[f".weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(text, np.uint8)
    numbers = table.astype(float)[codes] * np.repeat(scale, block)[: n * k]
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Written(config, tensors, numbers.reshape(n, k))


def int8_rows(n=48, k=64, seed=0):
    """bitsandbytes' LLM.int8: the largest magnitude of each row."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-127, 128, (n, k)).astype(np.int8)
    most = rng.uniform(0.1, 2, n).astype(np.float32)
    tensors = {".weight": values, ".SCB": most, ".weight_format": np.zeros((), np.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return Written(config, tensors, values * most.astype(float)[:, None] / 127)
