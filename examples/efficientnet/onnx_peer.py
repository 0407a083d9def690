"""The same model as an ONNX graph, to compare with onnxruntime in float and in static int8.

Needs onnx and onnxruntime, of the dependency group peers.
"""

import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from ..minilm.onnx_peer import Graph
from .model import SIZE, STRIDES

OPSET = 17


def build(params):
    """Returns ``model.classify`` with folded parameters as an ONNX model of ``images``, NHWC."""
    graph = Graph()
    add = graph.add

    def conv(p, x, stride=1, groups=1):
        kernel = np.ascontiguousarray(p["kernel"].transpose(3, 2, 0, 1))
        options = {"strides": [stride, stride], "group": groups, "auto_pad": "SAME_UPPER"}
        return add("Conv", x, kernel, p["bias"], **options)

    def relu6(x):
        return add("Clip", x, np.float32(0), np.float32(6))

    x = add("Transpose", "images", perm=[0, 3, 1, 2])
    x = relu6(conv(params["stem"], x, 2))
    features = params["stem"]["bias"].size
    for p, stride in zip(params["blocks"], STRIDES, strict=True):
        y = relu6(conv(p["expand"], x)) if "expand" in p else x
        y = relu6(conv(p["depthwise"], y, stride, p["depthwise"]["bias"].size))
        y = conv(p["project"], y)
        outputs = p["project"]["bias"].size
        x = add("Add", x, y) if (stride, outputs) == (1, features) else y
        features = outputs
    x = add("Flatten", add("GlobalAveragePool", relu6(conv(params["head"], x))))
    x = add("Gemm", x, params["classifier"]["kernel"], params["classifier"]["bias"])

    floats = TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("images", floats, ["batch", SIZE, SIZE, 3])]
    outputs = [helper.make_tensor_value_info(x, floats, ["batch", "classes"])]
    constants = list(graph.constants.values())
    made = helper.make_graph(graph.nodes, "efficientnet", inputs, outputs, initializer=constants)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
    onnx.checker.check_model(model)
    return model


class _Batches(CalibrationDataReader):
    def __init__(self, images):
        self.left = [images[i : i + 1] for i in range(len(images))]

    def get_next(self):
        return {"images": self.left.pop(0)} if self.left else None


def make_classifiers(params, images, threads=2):
    """Returns ``classify(images)`` in onnxruntime and the model's bytes, by variant.

    The variants are "float32" and "int8": static ranges, a scale per output feature.

    Args:
        params: folded, NumPy.
        images: the ranges are those of these, NHWC.
        threads: of onnxruntime.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.onnx" for name in ("float32", "int8")}
        prepared = Path(folder) / "prepared.onnx"  # as onnxruntime asks for before it quantizes
        onnx.save(build(params), files["float32"])
        quant_pre_process(files["float32"], prepared, skip_symbolic_shape=True)
        quantize_static(
            prepared,
            files["int8"],
            _Batches(images),
            per_channel=True,
            weight_type=QuantType.QInt8,
            activation_type=QuantType.QUInt8,
        )
        return {
            name: (_classifier(file.read_bytes(), threads), file.stat().st_size)
            for name, file in files.items()
        }


def _classifier(model, threads):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"images": images})[0]
