"""The command: trains, exports, runs, prints."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from tabulate import tabulate

from interception_core import JaxtapError

from ..decide.rules import INT8
from ..exporting.export import export
from ..litert import Runner, save
from ..litert.extras import require
from ..train.provider import qat

if TYPE_CHECKING:
    from ..exporting.artifact import Artifact
    from .training import Digits


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``jaxtap demo-odml``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument(
        "--engine", choices=["trace", "patch"], help="what taps the model (default: the best)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the split and the training")


@dataclass(frozen=True)
class Outcome:
    """How the model is where it runs; fractions are of the test images.

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
    """Runs the demo.

    Returns:
        0.

    Raises:
        JaxtapError: a library that the demo needs is missing, or there is nowhere to write to.
    """
    try:
        import optax  # noqa: F401
        import sklearn  # noqa: F401
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        message = f"The demo needs {error.name}: install provider-odml[litert,demo]."
        raise JaxtapError(message) from error
    # Said before the training, not after it.
    require("litert_converter")
    require("ai_edge_litert")
    from . import model as _model
    from .training import EPOCHS, Digits, train

    if args.json is not None and not args.json.parent.is_dir():
        raise JaxtapError(f"There is no folder {args.json.parent} to write {args.json.name} into.")

    digits = Digits.load(args.seed)
    first = _model.init(jax.random.key(args.seed))
    with tqdm(total=EPOCHS["float"], desc="training in float", unit="epoch", disable=None) as bar:
        floats = train(_model.apply, first, digits, "float", args.seed, bar.update)
    quantized = qat(_model.apply, INT8, engine=args.engine)
    stats = quantized.init(floats, digits.test_images)
    with tqdm(total=EPOCHS["QAT"], desc="training with QAT", unit="epoch", disable=None) as bar:
        apply = partial(quantized, quant_stats=stats)
        params = train(apply, floats, digits, "QAT", args.seed, bar.update)

    art = export(_model.apply, params, stats, INT8, digits.test_images, engine=args.engine)
    evaluate = partial(quantized, quant_stats=stats, update_quant_stats=False)
    in_litert = _run_file(art, digits.test_images)
    logits = {
        "JAX, float": jax.jit(_model.apply)(floats, digits.test_images),
        "JAX, QAT": jax.jit(evaluate)(params, digits.test_images),
        "LiteRT": in_litert,
    }
    outcomes = _outcomes(logits, digits, sum(x.nbytes for x in jax.tree.leaves(params)), art)
    _print(outcomes, art, len(digits.test_images))
    if args.json is not None:
        found = {
            "test_images": len(digits.test_images),
            "outcomes": [asdict(one) for one in outcomes],
            "report": art.report.as_json(),
        }
        save(args.json, (json.dumps(found, indent=2) + "\n").encode())
        print(f"\nWrote {args.json}.")
    return 0


def _run_file(art: Artifact, images: np.ndarray) -> np.ndarray:
    """Writes the .tflite, and runs what was written."""
    with tempfile.TemporaryDirectory() as folder:
        path = art.save(Path(folder) / "digits.tflite")
        runner = Runner(path.read_bytes())
        (logits,) = runner.run("serving_default", image=images).values()
    return logits


def _outcomes(
    logits: dict[str, Any], digits: Digits, float_bytes: int, art: Artifact
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
    print(tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * 3)))
    print("\nthe .tflite, tensor by tensor beside JAX\n")
    print(art.report)
