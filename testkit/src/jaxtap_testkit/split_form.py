"""A stored form of two halves, and a plugin that declares it."""

import contextlib
import dataclasses
import sys
import types
from typing import ClassVar

import jax
import pytest

import interception_core as core
import quant_numerics as qn
from hijax_trace import Part
from interception_core.testing import installed_plugins


def quantized(w, qtype="int8"):
    return qn.quantize(w, qtype, channel_axes=(1,))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Split(qn.StoredForm):
    """Two int4 arrays whose sum is the array: what the first lacks is rounded a second time."""

    kind: ClassVar[str] = "acme-split"
    qtype: ClassVar[str] = "int4"

    coarse: qn.QArray
    fine: qn.QArray

    @property
    def shape(self):
        return self.coarse.shape

    @property
    def dtype(self):
        return self.coarse.dtype

    @property
    def nbytes(self):
        return self.coarse.nbytes + self.fine.nbytes

    @property
    def scale_shape(self):
        return self.coarse.scale_shape

    def restore(self):
        return self.coarse.restore() + self.fine.restore()

    def parts(self):
        return {"coarse": Part(self.coarse), "fine": Part(self.fine)}

    def reduced(self, contraction, side, x, extras):
        operands = (self.fine, x) if side == 0 else (x, self.fine)
        return self.coarse, x, contraction.run(*operands, *extras)

    def arrays(self):
        parts = {"coarse": self.coarse.arrays(), "fine": self.fine.arrays()}
        return {f"{of}.{name}": x for of, held in parts.items() for name, x in held.items()}

    def to_parts(self, scale_shape=None):
        about = {"shape": list(self.shape), "dtype": self.dtype.name, "qtype": self.qtype}
        return qn.Parts(self.kind, about, self.arrays())

    @classmethod
    def from_parts(cls, about, arrays):
        def one(name):
            held = {
                part.partition(".")[2]: x for part, x in arrays.items() if part.startswith(name)
            }
            return qn.QArray.from_parts(about, held)

        return cls(one("coarse"), one("fine"))


def split(w):
    coarse = quantized(w, "int4")
    return Split(coarse, quantized(w - coarse.restore(), "int4"))


qn.register_serialization(Split)


@contextlib.contextmanager
def declaring(name):
    """Declare the form of this file under a name, in a plugin."""
    module = types.ModuleType("acme_split_plugin")
    module.API, module.Split = (1, 7), Split
    spec = core.FormSpec(name, "two int4 arrays", "acme_split_plugin:Split")
    module.jaxtap_register_forms = core.hookimpl(lambda: [spec])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        with installed_plugins(module.__name__):
            yield
