"""A report that is written by hand."""

import math

from provider_xla.report.quality import QualityReport
from provider_xla.report.results import Error, FloatOp, OpQuality, OutputQuality, ParameterQuality

NASTY = "<script>alert('1')</script> & $x^2$ \"quoted\"/matmul:0"


def op(op_id, sqnr=30.0, paths=("args[0]['w']",), **changes):
    fields = {
        "op_id": op_id,
        "op_name": "matmul",
        "operands": ("f32[8,64]", "f32[64,32]"),
        "qtypes": (None, "int8"),
        "rule": 0,
        "paths": paths,
        "kernel": None,
        "kernel_reason": "no kernel",
        "calls": 1.0,
        "error": Error(sqnr, 0.25),
        "steps": (),
        "flops": 32768,
        "float_seconds": 1e-3,
        "seconds": 2e-3,
        "share": 0.2,
    }
    return OpQuality(**(fields | changes))


def sample(ops, timed=True):
    parameters = [
        ParameterQuality(
            "args[0]['w']", (64, 32), "float32", "int8", 0, 8192, 2176, Error(44, 0.1)
        ),
        ParameterQuality("args[0]['<b>']", (32,), "float32", None, None, 128, 128, None),
    ]
    outputs = [
        OutputQuality("['y']", (8, 32), "float32", Error(28.5, 0.5), 0.999, None),
        OutputQuality("['i']", (8,), "int32", None, None, 0.875),
    ]
    left = [FloatOp("einsum:0", "einsum", ("f32[2]",), 1, "because <i>", (), None, 100)]
    times = (3e-3, 4e-3) if timed else (None, None)
    return QualityReport(
        tuple(ops), tuple(left), tuple(parameters), tuple(outputs), ("a & b",), 1, "cpu", *times
    )


def many(count=60):
    steps = (Error(10.0, 0.1), Error(math.inf, 0.0), Error(None, None))
    return sample(
        [
            op(NASTY),
            op("exact:0", math.inf),
            op("not_run:0", None, error=Error(None, None), calls=0.0),
            op("noise:0", -3.0),
            op("scan(f)/matmul:0", 18.0, steps=steps, calls=3.0),
            op("take:0", seconds=None, float_seconds=None, share=None, rule=None),
            *(op(f"a/{'very/' * 20}long/name_{i}/matmul:0", 20.0 + i) for i in range(count - 6)),
        ]
    )
