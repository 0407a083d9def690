"""The command of the demo: train, quantize, run, print."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from interception_core import demo_kit, get_provider

if TYPE_CHECKING:
    from provider_xla import Plan

    from .models import Model

FORMATS = ("w8a8", "w4a8")
"""The presets that are shown."""


@dataclass(frozen=True)
class Outcome:
    """How a model does in one format, on the test images.

    Attributes:
        format: "float", or one of ``FORMATS``.
        parameter_bytes: bytes of all parameters as they are saved, not packed for kernels.
        accuracy: fraction of the images whose digit is right.
        agreement: fraction of the images whose digit is that of the float model.
    """

    format: str
    parameter_bytes: int
    accuracy: float
    agreement: float


@dataclass(frozen=True)
class Result:
    """One model's outcomes, and what happens to its operations in the first format."""

    model: str
    test_images: int
    outcomes: list[Outcome]
    ops: list[dict[str, Any]]


def run(args: argparse.Namespace) -> int:
    """Run the demo.

    Returns:
        0.

    Raises:
        JaxtapError: a library that the demo needs is missing, or there is nowhere to write to.
    """
    demo_kit.ready(args, "jaxtap[xla]")
    from .models import MODELS
    from .training import EPOCHS, train

    digits = demo_kit.Digits.load(args.seed)
    results = []
    for model in MODELS:
        with demo_kit.progress(EPOCHS, f"training, {model.name}") as advance:
            params = train(model, digits, args.seed, advance)
        forms = 1 + len(FORMATS)
        with demo_kit.progress(forms, f"quantizing, {model.name}", "format") as advance:
            outcomes, plan = _quantize(model, params, digits, args.engine, advance)
        count = len(digits.test_images)
        results.append(Result(model.name, count, outcomes, _ops(plan)))
        print(f"\n{model.name} model on {count} test images\n")
        rows = [
            [one.format, f"{one.parameter_bytes:,}", f"{one.accuracy:.2%}", f"{one.agreement:.2%}"]
            for one in outcomes
        ]
        headers = ["parameters", "stored bytes", "accuracy", "same digit as in float"]
        demo_kit.print_table(headers, rows)
        print(f"\nin {FORMATS[0]}\n\n{plan.ops}\n")
    demo_kit.write_json(args.json, [asdict(result) for result in results])
    return 0


def _quantize(
    model: Model,
    params: Any,
    digits: demo_kit.Digits,
    engine: str | None,
    advance: Callable[[], object],
) -> tuple[list[Outcome], Plan]:
    """Run a model in float and all formats, each compiled first.

    ``advance`` is called after each.

    Returns:
        The outcomes, and the plan for the first format.
    """
    from provider_xla import PtqProvider
    from provider_xla.features import is_stored

    images, labels = digits.test_images, digits.test_labels

    def digits_of(fn: Any, params: Any) -> Any:
        return np.asarray(jax.jit(fn)(params, images)).argmax(axis=-1)

    in_float, plans = digits_of(model.apply, params), []
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    outcomes = [Outcome("float", size, float(np.mean(in_float == labels)), 1.0)]
    advance()
    for name in FORMATS:
        # The patch engine can't tell weights that a program computes from activations: unless it is
        # told otherwise it quantizes both, and the engines' tables would differ.
        (rule,) = PtqProvider(name).rules
        rule = dataclasses.replace(rule, weights_only=True)
        provider = get_provider("ptq", rules=rule, engine=engine)
        plan = provider.plan(model.apply, params, images)
        qvalue = plan.quantize(params, prepack=False)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(qvalue, is_leaf=is_stored))
        # The patch engine quantizes parameters at each call, with the same result.
        stored = params if engine == "patch" else plan.prepack(qvalue)
        found = digits_of(provider.apply(model.apply), stored)
        accuracy, agreement = float(np.mean(found == labels)), float(np.mean(found == in_float))
        outcomes.append(Outcome(name, size, accuracy, agreement))
        plans.append(plan)
        advance()
    return outcomes, plans[0]


def _ops(plan: Plan) -> list[dict[str, Any]]:
    """Return the operations without their kernels, which depend on the machine and the engine."""
    return [
        {name: value for name, value in op.items() if not name.startswith("kernel")}
        for op in plan.ops.as_json()
    ]
