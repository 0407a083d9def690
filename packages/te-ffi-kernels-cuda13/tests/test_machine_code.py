"""What the kernels are compiled to, on any machine."""

import ast
import importlib.util
import re
import struct
from pathlib import Path

FOLDER = Path(__file__).parents[1]
KERNELS = FOLDER / "csrc" / "cuda" / "kernels"
ELF = 2  # machine code, not PTX
MANY = 512


def fat_binaries(data):
    """(kind, architecture) of all code that nvcc put in a file, for each of its sources."""
    magic = struct.pack("<IH", 0xBA55ED50, 1)
    at = data.find(magic)
    while at >= 0:
        header, size = struct.unpack_from("<HQ", data, at + 6)
        at, end = at + header, at + header + size
        found = set()
        while at < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
            found.add((kind, *struct.unpack_from("<I", data, at + 28)))
            at += header + size
        yield found
        at = data.find(magic, end)


def test_there_is_code_for_all_gpus_since_ampere():
    text = (FOLDER / "CMakeLists.txt").read_text()
    names = re.search(r"set\(CMAKE_CUDA_ARCHITECTURES ([^)]*)\)", text)[1].split()
    real = {int(name.removesuffix("-real")) for name in names}
    assert {80, 90, 100, 120} <= real
    # PTX as well, of the newest, and of what is the base of 11.0, which has no code of its own.
    assert {"100", "120"} <= set(names)


def test_every_kernel_has_code_for_the_same_gpus():
    spec = importlib.util.find_spec("te_ffi_kernels_cuda13._native")
    if spec is None:
        # Built without nvcc: there is nothing to look at, which the package says.
        import te_ffi_kernels_cuda13

        assert "no kernels" in te_ffi_kernels_cuda13.status()
        return
    found = list(fat_binaries(Path(spec.origin).read_bytes()))
    assert len(found) > 30
    assert all(one == found[0] for one in found)
    assert (ELF, 90) in found[0]


def constants(text):
    """The constants of a source, as expressions."""
    return dict(
        pair
        for line in re.findall(r"constexpr int ([^;{]*);", text)
        for pair in re.findall(r"(k\w+) = ([^,]+)", line)
    )


def value(expression, known):
    """An expression of whole numbers and constants; None of anything else."""

    def of(node):
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in known:
            return value(known[node.id], known)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.FloorDiv | ast.Div):
            left, right = of(node.left), of(node.right)
            if left is None or right is None:
                return None
            return left * right if isinstance(node.op, ast.Mult) else left // right
        return None

    try:
        return of(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        return None


def test_kernels_of_many_threads_say_so():
    """Without bounds a thread may get more registers than so many threads can have."""
    large = []
    for path in sorted([*KERNELS.glob("*.cu"), *KERNELS.glob("*.h")]):
        text = path.read_text()
        known = constants(text) | constants((KERNELS / "softmax_rows.h").read_text())
        launched = re.findall(r"launch\((\w+)(?:<[^;]*?>)?,[^;]*?(k\w*Threads)\b", text)
        # `run_rows` launches the last of three kernels that it is given with so many threads.
        rows = re.findall(r"run_rows\((?:softmax_args[^;]*?), (\w+)(?:<\w+>)?,\s*stream\)", text)
        if path.name == "softmax_rows.h":
            assert ("many", "kBlockThreads") in launched
            launched.remove(("many", "kBlockThreads"))
        for name, threads in [*launched, *((name, "kBlockThreads") for name in rows)]:
            if (value(known.get(threads, ""), known) or 0) < MANY:
                continue
            large.append(name)
            assert f"__launch_bounds__({threads}) {name}(" in text, f"{path.name}: {name}"
    assert "column_sums_kernel" in large
    assert {"softmax_forward_block_kernel", "softmax_backward_block_kernel"} <= set(large)
