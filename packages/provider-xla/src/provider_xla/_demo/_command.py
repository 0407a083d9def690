"""The command: trains, runs in float and in int8, prints both."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from interception_core import JaxtapError


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``jaxtap demo``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument(
        "--engine", choices=["trace", "patch"], help="what taps the model (default: the best)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the split and the training")


@dataclass(frozen=True)
class Result:
    """One model's outcome; accuracies and agreement are fractions of the test images."""

    model: str
    test_images: int
    float_accuracy: float
    int8_accuracy: float
    agreement: float
    ops: list[dict[str, Any]]


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
        raise JaxtapError(f"The demo needs {error.name}: install provider-xla[demo].") from error
    import jax
    import numpy as np

    from interception_core import get_provider

    from ._models import MODELS
    from ._training import EPOCHS, Digits, train

    if args.json is not None and not args.json.parent.is_dir():
        raise JaxtapError(f"There is no folder {args.json.parent} to write {args.json.name} into.")
    digits = Digits.load(args.seed)
    results = []
    for model in MODELS:
        with tqdm(total=EPOCHS, desc=f"training, {model.name}", unit="epoch") as bar:
            params = train(model, digits, args.seed, bar.update)
        provider = get_provider("ptq", engine=args.engine)
        runs = [
            np.asarray(jax.jit(apply)(params, digits.test_images)).argmax(axis=-1)
            for apply in (model.apply, provider.apply(model.apply))
        ]
        in_float, in_int8 = (float(np.mean(run == digits.test_labels)) for run in runs)
        agreement = float(np.mean(runs[0] == runs[1]))
        report = provider.report()
        results.append(
            Result(model.name, len(runs[0]), in_float, in_int8, agreement, report.as_json())
        )
        print(f"\n{model.name} model on {len(runs[0])} test images")
        print(f"  accuracy  float {in_float:.2%}   int8 {in_int8:.2%}")
        print(f"  both say the same digit on {agreement:.2%}\n")
        print(report, end="\n\n")
    if args.json is not None:
        _write(args.json, [asdict(result) for result in results])
        print(f"Wrote {args.json}.")
    return 0


def _write(path: Path, value: Any) -> None:
    """Writes JSON to a temporary name first, so that ``path`` is whole or not there."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(json.dumps(value, indent=2) + "\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
