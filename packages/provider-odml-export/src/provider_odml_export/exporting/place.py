"""Place: an operand of an operation of a file."""

from __future__ import annotations

from dataclasses import dataclass

from ..litert import Model, Tensor


@dataclass(frozen=True)
class Place:
    """An operand in a file, to find it again in the quantized one.

    Attributes:
        graph: the index of the subgraph.
        kind: the kind of the operation.
        output: the name of its output.
        slot: which operand.
    """

    graph: int
    kind: str
    output: str
    slot: int

    def tensor(self, model: Model) -> Tensor | None:
        """Return what is stored for it, if it is still there."""
        graph = model.subgraphs[self.graph]
        makers = {i: op for op in graph.ops for i in op.outputs}
        for op in graph.ops:
            if op.name == self.kind and graph.tensors[op.outputs[0]].name == self.output:
                place = op.inputs[self.slot]
                maker = makers.get(place)
                if maker is not None and maker.name == "DEQUANTIZE":
                    place = maker.inputs[0]
                return graph.tensors[place] if graph.tensors[place].nbytes else None
        return None
