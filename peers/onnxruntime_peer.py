"""onnxruntime beside jaxtap_llm: a decoder as an ONNX graph, with operators for such models.

Matmuls are MatMulNBits: 4 bits, blocks of 32. Attention is GroupQueryAttention, which turns queries
and keys, and writes to the cache where it lies.
"""

import time

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

BLOCK = 32
CONTRIB = "com.microsoft"


def quantized(kernel):
    """Return uint8 ``[out, in / 32, 16]`` and float32 scales ``[out * in / 32]`` of ``[in, out]``.

    A block's largest value, with its sign, has the value -8, as in Q4_0 of llama.cpp.
    """
    blocks = np.ascontiguousarray(np.asarray(kernel, np.float32).T).reshape(-1, BLOCK)
    at = np.abs(blocks).argmax(axis=1)
    scale = blocks[np.arange(len(blocks)), at] / -8
    safe = np.where(scale == 0, 1, scale)[:, None]
    values = np.clip(np.rint(blocks / safe) + 8, 0, 15).astype(np.uint8)
    packed = values[:, ::2] | (values[:, 1::2] << 4)
    return packed.reshape(kernel.shape[1], -1, BLOCK // 2), scale


class _Graph:
    """Nodes and constants, as they come."""

    def __init__(self, accuracy):
        self.nodes, self.constants, self._accuracy = [], [], accuracy

    def constant(self, name, array):
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def add(self, kind, inputs, outputs, domain="", **attributes):
        node = helper.make_node(kind, inputs, outputs, name=outputs[0], domain=domain, **attributes)
        self.nodes.append(node)
        return outputs[0]

    def matmul(self, x, name, kernel, bias=None):
        values, scale = quantized(kernel)
        inputs = [x, self.constant(f"{name}.values", values), self.constant(f"{name}.scale", scale)]
        if bias is not None:
            inputs += ["", "", self.constant(f"{name}.bias", np.asarray(bias, np.float32))]
        rows, columns = kernel.shape
        sizes = {"K": rows, "N": columns, "bits": 4, "block_size": BLOCK}
        sizes["accuracy_level"] = self._accuracy
        return self.add("MatMulNBits", inputs, [f"{name}.out"], CONTRIB, **sizes)

    def norm(self, x, name, scale, epsilon, skip=None):
        """Return the norm of x, or of x + skip, and that sum."""
        scale = self.constant(f"{name}.weight", np.asarray(scale, np.float32))
        if skip is None:
            out = [f"{name}.out"]
            self.add("SimplifiedLayerNormalization", [x, scale], out, axis=-1, epsilon=epsilon)
            return out[0], x
        out = [f"{name}.out", "", "", f"{name}.sum"]
        inputs = [x, skip, scale]
        self.add("SkipSimplifiedLayerNormalization", inputs, out, CONTRIB, epsilon=epsilon)
        return out[0], out[3]


def make_model(config, params, positions, accuracy=4):
    """Return the ONNX model: tokens and a cache to the likeliest token behind, and the cache.

    Args:
        config: of a Llama or Qwen 2 (grouped queries, no experts).
        params: float, NumPy.
        positions: of the cache.
        accuracy: of matmuls: 1 has float32 activations, 4 rounds them to int8, which is fastest.
    """
    if config.family not in ("llama", "qwen2"):
        raise ValueError(f"The decoder must be a Llama or Qwen 2, got {config.family}.")
    graph = _Graph(accuracy)
    table = graph.constant("embed", np.asarray(params["embed"], np.float16))
    x = graph.add("Gather", [table, "tokens"], ["embed.half"])
    x = graph.add("Cast", [x], ["embed.out"], to=TensorProto.FLOAT)
    angles = np.arange(positions)[:, None] * config.ropes[0].frequencies(config.head_size)
    turns = [
        graph.constant(name, fn(angles).astype(np.float32))
        for name, fn in (("cos", np.cos), ("sin", np.sin))
    ]
    inner, skip, shape = config.inner, None, ["batch", config.kv_heads, positions]
    halves = graph.constant("halves", np.array([inner, inner], np.int64))
    caches = []
    for i in range(config.layers):
        p = {name: np.asarray(stack[i]) for name, stack in params["layers"].items()}
        at = f"layer.{i}."
        y, x = graph.norm(x, f"{at}attention_norm", p["attention_norm"], config.epsilon, skip)
        qkv = graph.matmul(y, f"{at}qkv", p["qkv"], p.get("qkv_bias"))
        past, present = ([f"{kind}.{i}.{one}" for one in "kv"] for kind in ("past", "present"))
        y = graph.add(
            "GroupQueryAttention",
            [qkv, "", "", *past, "seen", "total", *turns],
            [f"{at}mixed", *present],
            CONTRIB,
            num_heads=config.heads,
            kv_num_heads=config.kv_heads,
            scale=config.scale,
            do_rotary=1,
        )
        skip = graph.matmul(y, f"{at}out", p["out"])
        y, x = graph.norm(x, f"{at}mlp_norm", p["mlp_norm"], config.epsilon, skip)
        both = graph.matmul(y, f"{at}gate_up", p["gate_up"])
        gate, up = f"{at}gate", f"{at}up"
        graph.add("Split", [both, halves], [gate, up], axis=-1)
        open_ = graph.add("Sigmoid", [gate], [f"{at}sigmoid"])
        silu = graph.add("Mul", [gate, open_], [f"{at}silu"])
        skip = graph.matmul(graph.add("Mul", [silu, up], [f"{at}hidden"]), f"{at}down", p["down"])
        caches += [*zip(past, present, strict=True)]
    x, _ = graph.norm(x, "norm", params["norm"], config.epsilon, skip)
    last = graph.constant("last", np.array([-1], np.int64))
    x = graph.add("Gather", [x, last], ["last.out"], axis=1)
    head = np.asarray(params["embed"]).T if config.tied else np.asarray(params["head"])
    logits = graph.matmul(x, "head", head)
    graph.add("ArgMax", [logits], ["next"], axis=-1, keepdims=0)

    def info(name, kind, size):
        return helper.make_tensor_value_info(name, kind, size)

    whole = [*shape, config.head_size]
    inputs = [info("tokens", TensorProto.INT64, ["batch", "length"])]
    inputs += [info("seen", TensorProto.INT32, ["batch"]), info("total", TensorProto.INT32, [])]
    inputs += [info(past, TensorProto.FLOAT, whole) for past, _ in caches]
    outputs = [info("next", TensorProto.INT64, ["batch", 1])]
    outputs += [info(present, TensorProto.FLOAT, whole) for _, present in caches]
    outputs += [info(logits, TensorProto.FLOAT, ["batch", 1, config.vocabulary])]
    made = helper.make_graph(graph.nodes, "decoder", inputs, outputs, graph.constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_model(made, opset_imports=opsets, ir_version=10)


class OnnxDecoder:
    """The graph in onnxruntime, with the interface of ``Timed``.

    Args:
        config: of the model.
        params: float, NumPy.
        positions: of the caches.
        threads: of onnxruntime.
        accuracy: as for ``make_model``.
    """

    def __init__(self, config, params, positions=1152, threads=2, accuracy=4):
        model = make_model(config, params, positions, accuracy)
        self.size = model.ByteSize()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._shape = config.kv_heads, positions, config.head_size
        self._vocabulary, self._caches = config.vocabulary, {}

    def prefill(self, length, batch):
        """Return the seconds that prompts of this length take."""
        return self._seconds(lambda: self.run(self._tokens(batch, length), 0))

    def decode(self, context, steps, batch):
        """Return the seconds of a step; what the cache holds does not change them."""

        def run():
            tokens = self._tokens(batch, 1)
            for i in range(steps):
                tokens = self.run(tokens, context + i)

        return self._seconds(run) / steps

    def run(self, tokens, position, output="next"):
        """Run tokens ``[batch, length]`` from a position on.

        Args:
            tokens: int64.
            position: of the first one; those before are in the cache.
            output: ``"next"`` for the likeliest tokens behind, or ``"head.out"`` for the logits.
        """
        binding = self._session.io_binding()
        batch, length = tokens.shape
        total = position + length
        binding.bind_cpu_input("tokens", tokens)
        binding.bind_cpu_input("seen", np.full(batch, total - 1, np.int32))
        binding.bind_cpu_input("total", np.array(total, np.int32))
        for name, cache in self._caches_of(batch).items():
            binding.bind_ortvalue_input(name, cache)
            # The same memory: the cache is written where it lies.
            binding.bind_ortvalue_output(name.replace("past", "present"), cache)
        binding.bind_output(output)
        self._session.run_with_iobinding(binding)
        return binding.get_outputs()[-1].numpy()

    def _caches_of(self, batch):
        if batch not in self._caches:
            empty = np.zeros((batch, *self._shape), np.float32)
            names = [one.name for one in self._session.get_inputs()]
            self._caches[batch] = {
                name: onnxruntime.OrtValue.ortvalue_from_numpy(empty.copy())
                for name in names
                if name.startswith("past")
            }
        return self._caches[batch]

    def _seconds(self, run):
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def _tokens(self, batch, length):
        return np.random.default_rng(0).integers(0, self._vocabulary, (batch, length))
