"""``jaxtap demo-odml``: a small model trained for the device, exported, and run in LiteRT."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from interception_core import demo_kit
from provider_odml import qat
from provider_odml.features import INT8

from ..exporting.export import export
from ..litert import Runner
from . import model

if TYPE_CHECKING:
    from ..exporting.artifact import Artifact

EPOCHS = {"float": 10, "QAT": 4}
_RATES = {"float": 3e-3, "QAT": 5e-4}


@dataclass(frozen=True)
class Outcome:
    """How good the model is in one place.

    Attributes:
        where: "JAX, float", "JAX, QAT" or "LiteRT".
        nbytes: of its parameters as floats, or of the file.
        accuracy: how many digits are right.
        agreement: how many are what the model in QAT says.
    """

    where: str
    nbytes: int
    accuracy: float
    agreement: float


def run(args: argparse.Namespace) -> int:
    """Run the demo.

    Returns:
        0.

    Raises:
        JaxtapError: a library that the demo needs is missing, or there is nowhere to write to.
    """
    demo_kit.ready(args, "provider-odml-export[demo]")
    digits = demo_kit.Digits.load(args.seed, (8, 8, 1))

    def train(apply: Any, params: Any, kind: str) -> Any:
        with demo_kit.progress(EPOCHS[kind], f"training, {kind}") as advance:
            return demo_kit.train(
                apply,
                params,
                digits,
                epochs=EPOCHS[kind],
                rate=_RATES[kind],
                seed=args.seed,
                advance=advance,
            )

    floats = train(model.apply, model.init(jax.random.key(args.seed)), "float")
    quantized = qat(model.apply, INT8, engine=args.engine)
    stats = quantized.init(floats, digits.test_images)
    params = train(partial(quantized, quant_stats=stats), floats, "QAT")

    art = export(model.apply, params, stats, INT8, digits.test_images, engine=args.engine)
    evaluate = partial(quantized, quant_stats=stats, update_quant_stats=False)
    in_litert = _run_file(art, digits.test_images)
    logits = {
        "JAX, float": jax.jit(model.apply)(floats, digits.test_images),
        "JAX, QAT": jax.jit(evaluate)(params, digits.test_images),
        "LiteRT": in_litert,
    }
    outcomes = _outcomes(logits, digits, sum(x.nbytes for x in jax.tree.leaves(params)), art)
    _print(outcomes, art, len(digits.test_images))
    found = {
        "test_images": len(digits.test_images),
        "outcomes": [asdict(one) for one in outcomes],
        "report": art.report.as_json(),
    }
    demo_kit.write_json(args.json, found)
    return 0


def _run_file(art: Artifact, images: np.ndarray) -> np.ndarray:
    """Write the .tflite, and runs what was written."""
    with tempfile.TemporaryDirectory() as folder:
        path = art.save(Path(folder) / "digits.tflite")
        runner = Runner(path.read_bytes())
        (logits,) = runner.run("serving_default", image=images).values()
    return logits


def _outcomes(
    logits: dict[str, Any], digits: demo_kit.Digits, float_bytes: int, art: Artifact
) -> list[Outcome]:
    found = {where: np.asarray(one).argmax(axis=-1) for where, one in logits.items()}
    return [
        Outcome(
            where,
            len(art.model) if where == "LiteRT" else float_bytes,
            float(np.mean(ours == digits.test_labels)),
            float(np.mean(ours == found["JAX, QAT"])),
        )
        for where, ours in found.items()
    ]


def _print(outcomes: list[Outcome], art: Artifact, count: int) -> None:
    print(f"\nconvolutional model on {count} test images\n")
    rows = [
        [one.where, f"{one.nbytes:,}", f"{one.accuracy:.2%}", f"{one.agreement:.2%}"]
        for one in outcomes
    ]
    headers = ["where", "bytes", "accuracy", "same digit as with QAT"]
    demo_kit.print_table(headers, rows)
    print("\nthe .tflite, tensor by tensor beside JAX\n")
    print(art.report)
