"""Turns StableHLO into a .tflite, in a separate process. Run as a script, never imported.

A folder is its only argument. It has ``job.json`` and the programs; what comes out is
``model.tflite``, or ``error.json``. Imports litert_converter and the standard library alone.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import traceback
from pathlib import Path
from typing import Any

# Imported like this since the bindings have no types.
converter: Any = importlib.import_module("litert_converter.converter_api_ext")
ir: Any = importlib.import_module("litert_converter.mlir.ir")
passmanager: Any = importlib.import_module("litert_converter.mlir.passmanager")
func: Any = importlib.import_module("litert_converter.mlir.dialects.func")
stablehlo: Any = importlib.import_module("litert_converter.mlir.dialects.stablehlo")

OURS = ("stablehlo.optimization_barrier", "stablehlo.composite", "quantfork.stats")
"""Operations that no program has: what tells the converter of scales."""
CONSTANTS = ("arith.constant", "tfl.pseudo_const", "tfl.pseudo_qconst")


class Failure(Exception):
    """What to tell the caller, by field."""

    def __init__(self, stage: str, **fields: Any):
        super().__init__(stage)
        self.fields = {"stage": stage, "converter": stablehlo.get_current_version(), **fields}


def main(folder: Path) -> int:
    """Run the job of a folder. Return the exit status."""
    job = json.loads((folder / "job.json").read_text())
    messages: list[str] = []
    fields: dict[str, Any]
    context = ir.Context()
    converter.prepare_mlir_context(context)

    def keep(diagnostic: Any) -> bool:
        if diagnostic.severity == ir.DiagnosticSeverity.ERROR:
            where = name_of(diagnostic.location)
            messages.append(f"{diagnostic.message} (at {where})" if where else diagnostic.message)
        print(f"{diagnostic.severity}: {diagnostic.message} {diagnostic.location}", file=sys.stderr)
        return True

    context.attach_diagnostic_handler(keep)
    try:
        with context:
            data = convert(folder, job, context)
    except Failure as failure:
        fields = failure.fields
        traceback.print_exc()
    except Exception as error:
        fields = {"stage": "python", "reason": f"{type(error).__name__}: {error}"}
        traceback.print_exc()
    else:
        (folder / "model.tflite").write_bytes(data)
        return 0
    # Fallbacks that the converter tried and recovered from come first.
    fields["messages"] = list(dict.fromkeys(messages))
    (folder / "error.json").write_text(json.dumps(fields))
    return 1


def convert(folder: Path, job: Any, context: Any) -> bytes:
    """Return all programs as one .tflite."""
    modules = [lower(folder, program, job["strict"], context) for program in job["programs"]]
    module = modules[0]
    if len(modules) > 1:
        try:
            module = converter.merge_modules(modules)
        except Exception as error:
            raise Failure("merge", reason=str(error)) from error
    try:
        return converter.export_flatbuffer_to_bytes(module.operation)
    except Exception as error:
        # The exporter seldom says what it could not write.
        raise Failure("export", reason=str(error), left=left_over(module)) from error


def lower(folder: Path, program: Any, strict: bool, context: Any) -> Any:
    """Return a program as a module of TFLite operations."""
    name, inputs, outputs = program["name"], program["inputs"], program["outputs"]
    try:
        artifact = (folder / program["file"]).read_bytes()
        module = stablehlo.deserialize_portable_artifact(context, artifact)
    except Exception as error:
        raise Failure("read", program=name, reason=str(error)) from error
    entry = prefix_private(module, name)
    kind = entry.type
    found = {"inputs": len(kind.inputs), "outputs": len(kind.results)}
    if found != {"inputs": len(inputs), "outputs": len(outputs)}:
        raise Failure("names", program=name, found=found)
    converter.set_signature(module.operation, name, inputs, outputs)
    config = converter.ConvertToTFLConfig()
    config.strict_qdq_mode = strict
    if strict:
        config.qdq_conversion_mode = "STRICT"
    try:
        passes = passmanager.PassManager("builtin.module", context)
        converter.run_convert_to_tfl_passes(module, passes, config)
        outline_loops(module, name)
    except Exception as error:
        raise Failure("lower", program=name, reason=str(error), left=left_over(module)) from error
    return module


def prefix_private(module: Any, name: str) -> Any:
    """Make the private functions' names the program's own. Return the public function."""
    entry = None
    for one in list(module.body.operations):
        symbol = ir.StringAttr(one.attributes["sym_name"]).value
        if symbol == "main":
            entry = one
            continue
        own = f"{name}/{symbol}"
        ir.SymbolTable.replace_all_symbol_uses(symbol, own, module.operation)
        ir.SymbolTable.set_symbol_name(one, own)
    if entry is None:
        raise Failure("names", program=name, reason="The program has no function 'main'.")
    return entry


def left_over(module: Any) -> list[str]:
    """Return the operations that are not TFLite's, by name."""
    found: dict[str, None] = {}

    def look(op: Any) -> Any:
        dialect = op.name.partition(".")[0]
        if dialect not in ("tfl", "func", "builtin") and op.name not in CONSTANTS:
            kind = re.sub(r"^vhlo\.(\w+)_v\d+$", r"stablehlo.\1", op.name)
            if kind in OURS:
                return ir.WalkResult.ADVANCE
            where = name_of(op.location)
            found[f"{kind} (at {where})" if where else kind] = None
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    return list(found)


def name_of(location: Any) -> str:
    """Return where in the program a location is: its name stack, else its file and line."""
    text = str(location)
    names = re.findall(r'"([^"]*)"\(', text)
    line = re.search(r'"([^"]+)":(\d+):\d+', text)
    place = f"{line[1]}:{line[2]}" if line and line[1] != "-" else ""
    # An operation inside a function is located by its own name at that of the call.
    callsite = re.match(r'loc\(callsite\("([^"]*)" at "([^"]*)"\(', text)
    if callsite:
        return f"{callsite[2]}/{callsite[1]}, {place}".rstrip(", ")
    return f"{names[0]}, {place}".rstrip(", ") if names else place


def outline_loops(module: Any, name: str) -> None:
    """Move the regions of loops into functions, as the exporter wants them.

    The converter's own passes leave the regions where they are, and it then can't export them.
    """
    loops: list[Any] = []

    def look(op: Any) -> Any:
        if op.name == "tfl.while":
            loops.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)  # inner loops come before those around them
    for number, loop in enumerate(loops):
        outline(module, loop, f"{name}/while_{number}")


def outline(module: Any, loop: Any, name: str) -> None:
    """Make functions of one loop's condition and body."""
    captured = capture(loop)
    operands = [*loop.operands, *captured]
    types, location = [value.type for value in operands], loop.location
    while_op = ir.Operation.create(
        "tfl.while",
        results=types,
        operands=operands,
        attributes={one: loop.attributes[one] for one in loop.attributes},
        regions=2,
        loc=location,
        ip=ir.InsertionPoint(loop),
    )
    for region, new, kind in zip(loop.regions, while_op.regions, ("cond", "body"), strict=True):
        block = region.blocks[0]
        inner = [block.add_argument(value.type, location) for value in captured]
        for op in all_in(block):
            for index, value in enumerate(op.operands):
                if value in captured:
                    op.operands[index] = inner[captured.index(value)]
        end = block.operations[len(block.operations) - 1].operation
        results = list(end.operands) + (inner if kind == "body" else [])
        symbol = f"{name}_{kind}"
        with location, ir.InsertionPoint(module.body):
            made = func.FuncOp(symbol, (types, [value.type for value in results]))
            made.attributes["sym_visibility"] = ir.StringAttr.get("private")
        returned = [value.type for value in results]
        end.erase()
        with location, ir.InsertionPoint(block):
            func.ReturnOp(results)
        block.append_to(made.regions[0])
        block = new.blocks.append(*types, arg_locs=[location] * len(types))
        with location, ir.InsertionPoint(block):
            call = func.CallOp(returned, symbol, list(block.arguments))
            ir.Operation.create("tfl.yield", operands=list(call.results))
    for old, new in zip(loop.results, while_op.results, strict=False):
        old.replace_all_uses_with(new)
    loop.erase()


def capture(loop: Any) -> list[Any]:
    """Return what a loop uses from outside. Constants are copied into it instead."""
    captured: list[Any] = []
    for region in loop.regions:
        block = region.blocks[0]
        inside, copies = all_in(block), {}
        for op in inside:
            for index, value in enumerate(op.operands):
                by_block = isinstance(value.owner, ir.Block)
                owner = (value.owner.owner if by_block else value.owner).operation
                if owner in inside or owner == loop:
                    continue
                if by_block or owner.name not in CONSTANTS:
                    if value not in captured:
                        captured.append(value)
                    continue
                if owner not in copies:
                    copies[owner] = owner.clone(ip=ir.InsertionPoint.at_block_begin(block))
                op.operands[index] = copies[owner].results[0]
    return captured


def all_in(block: Any) -> list[Any]:
    """Return the operations of a block, and those within them."""
    found: list[Any] = []

    def look(op: Any) -> Any:
        found.append(op)
        return ir.WalkResult.ADVANCE

    for op in block.operations:
        op.operation.walk(look)
    return found


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
