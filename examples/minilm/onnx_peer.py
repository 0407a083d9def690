"""The same model as an ONNX graph, to compare with onnxruntime in float and in dynamic int8.

Needs onnx and onnxruntime, of the dependency group minilm.
"""

import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process

from .model import HEADS

OPSET = 20
"""Of 17 is LayerNormalization, of 20 Gelu."""


class Graph:
    """Collects nodes and constants; each node gives one value, which is known by its name."""

    def __init__(self):
        self.nodes = []
        self.constants = {}

    def add(self, op, *inputs, outputs=1, **attributes):
        """Adds a node and returns the name of its value, or names."""
        names = [f"{op}_{len(self.nodes)}_{i}" for i in range(outputs)]
        names = names if outputs > 1 else [names[0].removesuffix("_0")]
        self.nodes.append(helper.make_node(op, list(map(self._name, inputs)), names, **attributes))
        return names if outputs > 1 else names[0]

    def _name(self, value):
        if isinstance(value, str):
            return value
        name = f"constant_{len(self.constants)}"
        self.constants[name] = numpy_helper.from_array(np.asarray(value), name)
        return name


def build(params):
    """Returns ``model.encode`` with its parameters as an ONNX model.

    Its inputs are ``tokens``, int64, and ``mask``, float32, both ``[batch, length]``.
    """
    graph = Graph()
    add = graph.add
    width = params["embeddings"]["words"].shape[1]

    def shape(*sizes):
        return np.array(sizes, np.int64)  # 0 is the size of the input, -1 what is left

    def dense(p, x):
        return add("Add", add("MatMul", x, p["kernel"]), p["bias"])

    def norm(p, x):
        return add("LayerNormalization", x, p["scale"], p["bias"], axis=-1, epsilon=1e-12)

    def heads(x, perm):
        return add(
            "Transpose", add("Reshape", x, shape(0, 0, HEADS, width // HEADS)), perm=list(perm)
        )

    def attention(qkv):
        q, k, v = add("Split", qkv, outputs=3, axis=-1, num_outputs=3)
        scores = add("MatMul", heads(q, (0, 2, 1, 3)), heads(k, (0, 2, 3, 1)))
        scores = add("Mul", scores, np.float32((width // HEADS) ** -0.5))
        weights = add("Softmax", add("Add", scores, bias), axis=-1)
        mixed = add("MatMul", weights, heads(v, (0, 2, 1, 3)))
        return add("Reshape", add("Transpose", mixed, perm=[0, 2, 1, 3]), shape(0, 0, width))

    def layer(p, x):
        x = norm(p["attention_norm"], add("Add", x, dense(p["out"], attention(dense(p["qkv"], x)))))
        hidden = add("Gelu", dense(p["up"], x))
        return norm(p["mlp_norm"], add("Add", x, dense(p["down"], hidden)))

    masked = add("Mul", add("Sub", np.float32(1), "mask"), np.float32(-1e9))
    bias = add("Unsqueeze", masked, shape(1, 2))
    p = params["embeddings"]
    length = add("Shape", "tokens", start=1, end=2)
    positions = add("Slice", p["positions"], shape(0), length, shape(0))
    x = norm(p["norm"], add("Add", add("Gather", p["words"], "tokens"), positions))
    for p in params["layers"]:
        x = layer(p, x)
    weights = add("Unsqueeze", "mask", shape(2))
    total = add("ReduceSum", add("Mul", x, weights), shape(1), keepdims=0)
    x = add("Div", total, add("ReduceSum", weights, shape(1), keepdims=0))
    unit = add("LpNormalization", x, axis=-1, p=2)

    inputs = [
        helper.make_tensor_value_info("tokens", TensorProto.INT64, ["batch", "length"]),
        helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["batch", "length"]),
    ]
    outputs = [helper.make_tensor_value_info(unit, TensorProto.FLOAT, ["batch", width])]
    made = helper.make_graph(
        graph.nodes, "minilm", inputs, outputs, initializer=list(graph.constants.values())
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
    onnx.checker.check_model(model)
    return model


def make_encoders(params, threads=2):
    """Returns ``encode(tokens, mask)`` in onnxruntime and the model's bytes, by variant.

    The variants are "float32" and "int8": onnxruntime's dynamic quantization with its defaults,
    but for a scale per column.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.onnx" for name in ("float32", "int8")}
        prepared = Path(folder) / "prepared.onnx"  # as onnxruntime asks for before it quantizes
        onnx.save(build(params), files["float32"])
        quant_pre_process(files["float32"], prepared, skip_symbolic_shape=True)
        quantize_dynamic(prepared, files["int8"], weight_type=QuantType.QInt8, per_channel=True)
        return {
            name: (_encoder(file.read_bytes(), threads), file.stat().st_size)
            for name, file in files.items()
        }


def _encoder(model, threads):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def encode(tokens, mask):
        feed = {"tokens": tokens.astype(np.int64), "mask": mask.astype(np.float32)}
        return session.run(None, feed)[0]

    return encode
