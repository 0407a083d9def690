"""Rewrites of a whole .tflite: integers requantized at once, integer inputs and outputs, more
outputs, constants stored once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from .schema import op_name, pack, schema, unpack


def deduplicate(model: bytes) -> bytes:
    """Store equal constants once, whatever tensors and signatures they are of.

    Args:
        model: a .tflite.

    Returns:
        The same .tflite with fewer buffers.

    Raises:
        OdmlError: this is no .tflite.
    """
    found = unpack(model)
    compact(found)
    return pack(found)


def compact(model: Any) -> None:
    """Make a ``ModelT``'s tensors share equal buffers, and drop unused ones."""
    # Buffer 0 is by convention empty. Variables start from separate buffers.
    used = {0}
    own = set()
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            used.add(tensor.buffer)
            if tensor.isVariable:
                own.add(tensor.buffer)
    old = model.metadataBuffer if model.metadataBuffer is not None else ()
    own |= {entry.buffer for entry in model.metadata or ()} | {int(index) for index in old}
    kept, place, by_data = [], {}, {}
    for index, buffer in enumerate(model.buffers):
        if index not in used | own:
            continue
        data = b"" if buffer.data is None else np.asarray(buffer.data, np.uint8).tobytes()
        key = index if index in own else data
        if key not in by_data:
            by_data[key] = len(kept)
            kept.append(buffer)
        place[index] = by_data[key]
    model.buffers = kept
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            tensor.buffer = place[tensor.buffer]
    for entry in model.metadata or ():
        entry.buffer = place[entry.buffer]
    if model.metadataBuffer is not None:
        model.metadataBuffer = [place[int(index)] for index in model.metadataBuffer]


def requantized(model: bytes) -> bytes:
    """Requantize int8 tensors in one operation: a DEQUANTIZE and the QUANTIZE that reads it.

    The converter is told of both, since it gives a tensor that is read at two scales one of them.

    Args:
        model: a .tflite.

    Returns:
        The .tflite, or the same bytes where nothing is requantized.

    Raises:
        OdmlError: this is no .tflite.
    """
    found = unpack(model)
    codes = list(map(op_name, found.operatorCodes))
    changed = [_requantize(graph, codes) for graph in found.subgraphs]
    return pack(found) if any(changed) else model


def _requantize(graph: Any, codes: list[str]) -> bool:
    """Let each QUANTIZE of a subgraph read the int8 tensor behind its DEQUANTIZE, if it has one."""
    ops = list(graph.operators if graph.operators is not None else ())
    makers = {int(place): op for op in ops for place in op.outputs}
    dequantizes = [op for op in ops if codes[op.opcodeIndex] == "DEQUANTIZE"]
    changed = False
    for op in ops:
        before = makers.get(int(op.inputs[0])) if len(op.inputs) else None
        if before is None or codes[op.opcodeIndex] != "QUANTIZE" or before not in dequantizes:
            continue
        source = int(before.inputs[0])
        # Not from int8 to int16, at which LiteRT's kernel is 32766 steps off; and not a constant.
        ends = graph.tensors[source], graph.tensors[int(op.outputs[0])]
        if source in makers and all(end.type == schema().TensorType.INT8 for end in ends):
            op.inputs, changed = np.array([source], np.int32), True
    if changed:
        read = {int(place) for op in ops for place in op.inputs} | set(map(int, graph.outputs))
        graph.operators = [op for op in ops if op not in dequantizes or int(op.outputs[0]) in read]
    return changed


def integer_io(model: bytes) -> bytes:
    """Give the signatures' inputs and outputs their quantized types.

    A float input that is quantized first, and an output that is dequantized last, become what is
    on the integer side; all others stay as they are. Scales, zero points and names are kept.

    Args:
        model: a .tflite.

    Returns:
        The .tflite without those operations.

    Raises:
        OdmlError: this is no .tflite.
    """
    found = unpack(model)
    codes = list(map(op_name, found.operatorCodes))
    signatures = found.signatureDefs or ()
    for number in sorted({one.subgraphIndex for one in signatures}):
        graph = found.subgraphs[number]
        ins = {int(index): _quantized_input(graph, codes, int(index)) for index in graph.inputs}
        outs = {int(index): _quantized_output(graph, codes, int(index)) for index in graph.outputs}
        for one in signatures:
            if one.subgraphIndex == number:
                for entries, places in ((one.inputs, ins), (one.outputs, outs)):
                    for entry in entries or ():
                        entry.tensorIndex = places[entry.tensorIndex]
    return pack(found)


def with_outputs(model: bytes, added: Mapping[str, Mapping[str, int]]) -> bytes:
    """Give signatures more outputs: tensors that the file computes anyway.

    Args:
        model: a .tflite.
        added: by signature and name of the output, the index of the tensor in its subgraph.

    Returns:
        The .tflite, with the same operations.

    Raises:
        OdmlError: this is no .tflite.
    """
    found = unpack(model)
    for one in found.signatureDefs or ():
        graph = found.subgraphs[one.subgraphIndex]
        outputs = [int(index) for index in graph.outputs]
        for name, index in added.get(one.signatureKey.decode(), {}).items():
            entry = schema().TensorMapT()
            entry.name, entry.tensorIndex = name, index
            one.outputs = [*(one.outputs or ()), entry]
            if index not in outputs:
                outputs.append(index)
        graph.outputs = np.asarray(outputs, np.int32)
    return pack(found)


def _is_float(tensor: Any) -> bool:
    return tensor.type == schema().TensorType.FLOAT32


def _quantized_input(graph: Any, codes: list[str], index: int) -> int:
    """Take away an input's QUANTIZE where nothing else reads it. Return the new input."""
    readers = [op for op in graph.operators if index in op.inputs]
    one = readers[0] if len(readers) == 1 else None
    if one is None or codes[one.opcodeIndex] != "QUANTIZE":
        return index
    if not _is_float(graph.tensors[index]) or index in graph.outputs:
        return index
    new = int(one.outputs[0])
    if new in graph.outputs:
        # The graph only quantizes: a tensor that is an input and an output would need a copy.
        return index
    _rename(graph, index, new)
    graph.inputs = _replace(graph.inputs, index, new)
    graph.operators.remove(one)
    return new


def _quantized_output(graph: Any, codes: list[str], index: int) -> int:
    """Take away an output's DEQUANTIZE where nothing else reads it. Return the new output."""
    makers = [op for op in graph.operators if index in op.outputs]
    readers = [op for op in graph.operators if index in op.inputs]
    one = makers[0] if makers else None
    if one is None or readers or codes[one.opcodeIndex] != "DEQUANTIZE":
        return index
    new = int(one.inputs[0])
    made = any(new in op.outputs for op in graph.operators)
    # An output that is already one under another name, an input, or a constant stays in float.
    if not made or new in graph.outputs or not _is_float(graph.tensors[index]):
        return index
    if Counter(int(one) for one in graph.outputs)[index] > 1:
        return index
    _rename(graph, index, new)
    graph.outputs = _replace(graph.outputs, index, new)
    graph.operators.remove(one)
    return new


def _rename(graph: Any, old: int, new: int) -> None:
    """Give the integer tensor the float tensor's name."""
    first, second = graph.tensors[old], graph.tensors[new]
    first.name, second.name = second.name, first.name


def _replace(values: Any, old: int, new: int) -> Any:
    return np.asarray([new if value == old else value for value in values], np.int32)
