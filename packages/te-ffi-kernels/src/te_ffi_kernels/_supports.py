"""Which calls the kernels take: each function returns True, or the reason why not."""

import math

from interception_core import KernelCall

from ._measured import instruction_set, slower
from .packed_weights.layout import GROUP_ALIGNMENT

MOST_PRODUCTS = 2**17 - 64
"""Products of a convolution's sum, which int32 holds."""
MOST_TAPS = 1032
"""The same of a depthwise one, whose sums are taken in float32."""
_KEPT = 1 << 24
"""Numbers of an operand of ``dot_int8``, which it arranges in memory that a thread keeps."""
_FLOATS = ("float32", "bfloat16", "float16")
_FEATURES = 64
"""Input features from which a convolution was measured to be faster than XLA's in float32. Fewer
take longer to quantize than to multiply: see docs/benchmarks/provider-xla.md."""
_FEW_OUTPUTS, _MANY_PLACES = 64, 2048
"""Output features up to which, and places from which, the kernel for windows was measured to be
faster than a matmul, which quantizes each place alone and has little to multiply it with. That
kernel is for instructions for int8."""
_PLACES = 128
"""Places up to which one with float activations was, without instructions for int8."""
_PRODUCTS, _PRODUCTS_WIDENED = 16, 512
"""Products of a sum from which ``conv_w8a8`` was measured to be faster than XLA in float32, with
instructions for int8 and without: see docs/benchmarks/convolutions.md."""
_WIDENING = ("avx2", "neon")
"""Instruction sets without instructions for int8. NEON counts as AVX2, and its dot products as
AVX-VNNI, which do as much with as many instructions: nobody has measured time on Arm."""


def anything(call: KernelCall) -> bool | str:
    """Accept all calls without symbolic sizes."""
    for operand in call.operands:
        if not all(isinstance(size, int) for size in operand.shape):
            return f"an operand has the symbolic shape {operand}"
    return True


def quantizing(call: KernelCall) -> bool | str:
    """Tell whether numbers of a training step are quantized faster in the kernel."""
    if instruction_set() == "generic":
        return "XLA is faster on generic"
    return anything(call)


def int8_products(call: KernelCall) -> bool | str:
    """Tell whether products of int8 that a training step quantized are faster in the kernel."""
    isa = instruction_set()
    if isa in ("generic", *_WIDENING):
        return f"XLA is faster on {isa}, without instructions for int8"
    fits = anything(call)
    if fits is not True:
        return fits
    last = [call.param(f"{side}_last", False) for side in ("lhs", "rhs")]
    if isa == "amx" and any(last):
        return "XLA was not measured to be slower on amx, but for sums over rows of both sides"
    lhs, rhs = (operand.shape for operand in call.operands[:2])
    length = lhs[-1 if last[0] else -2]
    if length > MOST_PRODUCTS:
        return f"its sums have {length} products"
    if max(math.prod(lhs[-2:]), math.prod(rhs[-2:])) > _KEPT:
        return f"an operand is larger than the {_KEPT} numbers that a thread keeps memory for"
    return True


def matmul(call: KernelCall) -> bool | str:
    """Tell whether a matmul x[m, k] with weight[k, n] has a kernel."""
    x, weight = call.operands
    if x.dtype not in _FLOATS:
        return f"x is {x.dtype}"
    if weight.shape[0] == 0:
        return "nothing is contracted"
    k, n = weight.shape
    if not all(isinstance(size, int) for size in (x.shape[-1], k, n)):
        return f"the weight has the symbolic shape {weight}"
    if call.param("convolves", False) and (why := _slower_convolution(call)):
        return why
    # The kernel reads the number of rows when it is called: a symbolic one is as good.
    fits = packing_of(k, call.param("group", 0))
    if fits is not True or not isinstance(x.shape[0], int):
        return fits
    target = f"te_ffi_kernels.{call.op}"
    return slower(target, "rows", x.shape[0], _like(x.dtype), {"k": k, "n": n}) or True


def _slower_convolution(call: KernelCall) -> str | None:
    """Return why XLA is faster at a convolution with a window of one element, or None."""
    x, weight = call.operands
    isa = instruction_set()
    if isa == "generic":
        return "XLA is faster on generic at convolutions"
    if weight.shape[0] < _FEATURES:
        return f"XLA is faster at convolutions of fewer than {_FEATURES} input features"
    # That kernel takes weights with one scale for each output feature, and no tables.
    fits = not call.param("group", 0) and call.param("table", "int4") == "int4"
    many = isinstance(x.shape[0], int) and x.shape[0] >= _MANY_PLACES
    few_outputs = weight.shape[1] <= _FEW_OUTPUTS
    if fits and many and few_outputs and isa not in _WIDENING and call.op.endswith("a8"):
        form = call.op.rpartition("_")[2]
        return f"conv_{form} is faster at {_MANY_PLACES} places or more to few output features"
    few = isinstance(x.shape[0], int) and x.shape[0] <= _PLACES
    if isa in _WIDENING and not few and not call.op.endswith("a8"):
        return f"XLA is faster on {isa} at convolutions of floats at more than {_PLACES} places"
    return None


def convolution(call: KernelCall) -> bool | str:
    """Tell whether x[images, *sizes, channels] with kernel[*window, channels, n] has a kernel."""
    x, kernel = call.operands
    if x.dtype not in (*_FLOATS, "int8"):
        return f"x is {x.dtype}"
    if (why := _unfit_window(call)) is not None:
        return why
    *window, channels, n = kernel.shape
    taps, groups = math.prod(window), call.param("groups", 1)
    is_depthwise = _is_depthwise(call)
    if taps * channels > MOST_PRODUCTS or (is_depthwise and taps > MOST_TAPS):
        return f"its sums have {taps * channels} products"
    columns = 16 if call.op.startswith("conv_w8") else 32
    if groups > 1 and not is_depthwise and n // groups % columns:
        return f"its {groups} groups are not of whole panels of {columns} output channels"
    isa = instruction_set()
    if isa == "generic":
        return "XLA is faster on generic at convolutions"
    least = _PRODUCTS_WIDENED if isa in _WIDENING else _PRODUCTS
    if not is_depthwise and taps * channels < least:
        return f"XLA is faster on {isa} at convolutions with sums of fewer than {least} products"
    return True


def float_convolution(call: KernelCall) -> bool | str:
    """Tell the same where images stay floats."""
    x, _ = call.operands
    if x.dtype not in _FLOATS:
        return f"x is {x.dtype}"
    if (why := _unfit_window(call)) is not None:
        return why
    if not _is_depthwise(call):
        return "a convolution of float activations that is not depthwise"
    if instruction_set() == "generic":
        return "XLA is faster on generic at convolutions"
    return True


def _is_depthwise(call: KernelCall) -> bool:
    channels, n = call.operands[1].shape[-2:]
    return channels == 1 and n == call.param("groups", 1) > 1


def _unfit_window(call: KernelCall) -> str | None:
    """Return why no kernel convolves such shapes, or None."""
    x, kernel = call.operands
    if not all(isinstance(size, int) for size in (*x.shape[1:], *kernel.shape)):
        return f"an operand has the symbolic shape {x} or {kernel}"
    if not 3 <= len(x.shape) <= 2 + len("DHW"):
        return f"images have {len(x.shape) - 2} axes"
    if call.param("group", 0):
        return "the weight has groups of rows"
    if not math.prod(kernel.shape[:-1]):
        return "nothing is contracted"
    return None


def attention(call: KernelCall) -> bool | str:
    """Tell whether attention over a cache has a kernel."""
    fits = anything(call)
    if fits is not True:
        return fits
    q, keys = (operand.shape for operand in call.operands[:2])
    if len(q) == 5:  # as the op has it: [batch, queries, kv_heads, group, size]
        heads, kv_heads = q[2] * q[3], q[2]
        keys = keys[1:] if call.param("stacked", False) else keys
        positions = keys[2 if call.param("heads_first", True) else 1]
    else:  # as programs do: [..., positions, heads, size]
        heads, (positions, kv_heads) = q[-2], keys[-3:-1]
    near = {"heads": heads, "kv_heads": kv_heads}
    target = f"te_ffi_kernels.{call.op}"
    return slower(target, "positions", positions, _like(call.operands[1].dtype), near) or True


def _like(dtype: str) -> dict[str, str]:
    """Return what was measured for a dtype: the 16-bit ones are alike."""
    return {"dtype": "bfloat16" if dtype == "float16" else dtype}


def largest(call: KernelCall) -> bool | str:
    """Tell whether the largest numbers of rows are found faster in the kernel."""
    if call.operands[0].dtype == "float32":
        return "XLA is faster at float32"
    return anything(call)


def packing(call: KernelCall) -> bool | str:
    """Tell whether quantized values[k, n] have a packed form."""
    return packing_of(call.operands[0].shape[0], call.param("group", 0))


def taking(call: KernelCall) -> bool | str:
    """Tell whether rows or columns of a packed weight have a kernel."""
    return packing_of(call.param("k", 0), call.param("group", 0))


def packing_of(k: int, group: int) -> bool | str:
    """Tell whether k rows can have scales per `group` rows (0: one)."""
    if group and (group % GROUP_ALIGNMENT or k % group):
        return f"groups of {group} rows, and not a multiple of {GROUP_ALIGNMENT} that divides {k}"
    return True
