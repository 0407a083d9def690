"""Adapters of a model: which parameters have some, and the file of a fine-tuned folder."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import provider_xla as xla
from interception_core import get_feature

from . import checkpoint
from .config import Config, LlmError
from .quantized import whole_plan

FACTS, STATE = "finetune.json", "state.safetensors"
BASE = "base"
"""The folder in a fine-tuned one of the base, where it was quantized for that."""
_PATH = "['{}']['{}']"
_PART, _STEP = "adapters.", "step"


def adapted(config: Config) -> tuple[str, ...]:
    """Return the names of the parameters of a layer that have adapters: not experts.

    Args:
        config: of the layer, as ``config.view`` returns it.
    """
    mixer = "delta_in" if config.mixer == "delta" else "qkv"
    if config.experts:
        return (mixer, "out", *(("shared_gate_up", "shared_down") if config.shared_inner else ()))
    return (mixer, "out", "gate_up", "down")


def paths_of(config: Config) -> dict[str, str]:
    """Return the paths of all parameters that have adapters, by their names for people."""
    return {
        f"{stack.name}.{name}": _PATH.format(stack.name, name)
        for stack in config.stacks
        for name in adapted(config.view(stack))
    }


def of_layer(
    config: Config, arrays: dict[str, dict[str, Any]], layer: int
) -> dict[str, tuple[Any, Any]]:
    """Return the adapters of a layer by the name of the parameter, A and B.

    Args:
        config: of the model.
        arrays: as ``Tuned`` has them.
        layer: which one.
    """
    stack, at = config.place(layer)
    pairs = {name: arrays[f"args[0]{_PATH.format(stack.name, name)}"]
             for name in adapted(config.view(layer))}  # fmt: skip
    return {name: (pair["a"][at], pair["b"][at]) for name, pair in pairs.items()}


def plan_with(config: Config, rules: list[Any], lora: xla.Lora, dtype: str) -> Any:
    """Return the plan of a model whose parameters are stored by rules, with adapters beside them.

    Args:
        config: of the model.
        rules: what it was stored by.
        lora: of all adapters.
        dtype: of the activations.

    Raises:
        LlmError: a rule computes a parameter in a way that has no place for an adapter.
    """
    named = paths_of(config)
    paths = list(named.values())
    fields: dict[str, Any] = dataclasses.asdict(lora)
    found = []
    for rule in rules:
        own = [re.escape(path) for path in paths if rule.matches_weight([path])]
        if own and rule.kernel is None:
            of_rule: dict[str, Any] = {
                one.name: getattr(rule, one.name) for one in dataclasses.fields(rule)
            }
            of_rule["weight_path"] = "|".join(own)
            found.append(xla.LoraRule(**of_rule | fields))
        found.append(rule)
    others = "|".join(map(re.escape, paths))  # that no rule matches
    found.append(xla.LoraRule(weight_path=others, **fields))
    with warnings.catch_warnings():
        # Rules of other parameters have an effect without adapters alone.
        warnings.simplefilter("ignore", xla.QuantizationWarning)
        plan = whole_plan(config, found, dtype)
    for name, path in named.items():
        if f"args[0]{path}" not in plan.adapters:
            raise LlmError(
                f"{name} must be a matrix that rules leave in one piece, to have an adapter. Take "
                "other rules for the base."
            )
    return plan


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What a fine-tuned folder says.

    Attributes:
        base: the folder of the base.
        name: what the user called the base.
        lora: of the adapters.
        step: after how many steps they are so, ``of`` how many.
        arrays: ``"a"`` and ``"b"`` by key, as ``plan.init_adapters`` makes them.
    """

    base: Path
    name: str
    lora: xla.Lora
    step: int
    of: int
    arrays: dict[str, dict[str, np.ndarray]]

    def put_into(self, plan: Any, params: Any) -> Any:
        """Return the parameters of the base with the adapters beside them.

        Raises:
            LlmError: the adapters are of another model.
        """
        self.check({key: one.shapes for key, one in plan.adapters.items()})
        return get_feature("plan-put-adapters")(plan, params, self.arrays)

    def check(self, shapes: dict[str, dict[str, tuple[int, ...]]]) -> None:
        """Check that the adapters have these shapes, by key and part.

        Raises:
            LlmError: they are of another model.
        """
        pairs = self.arrays.items()
        found = {key: {part: x.shape for part, x in pair.items()} for key, pair in pairs}
        if found != shapes:
            raise LlmError(
                f"The adapters must be those of {self.base}, got other shapes or names. The folder "
                "has a checkpoint of another model: remove it, and run finetune again."
            )


def shapes_of(config: Config, rank: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of all adapters, by key and part."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for stack in config.stacks:
        view, count = config.view(stack), len(stack.layers)
        for name in adapted(view):
            inputs, outputs = checkpoint.layer_shapes(view)[name]
            found[f"args[0]{_PATH.format(stack.name, name)}"] = {
                "a": (count, inputs, rank),
                "b": (count, rank, outputs),
            }
    return found


def is_finetuned(folder: Any) -> bool:
    """Return whether ``finetune`` wrote a folder, or began to."""
    return (Path(folder) / FACTS).is_file()


def read_facts(folder: Any) -> dict[str, Any]:
    """Return what a fine-tuned folder was begun with.

    Raises:
        LlmError: the file is damaged.
    """
    path = Path(folder) / FACTS
    try:
        facts = json.loads(path.read_text())
        return {name: facts[name] for name in ("base", "data", "adapters", "training")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LlmError(
            f"{path} must be what finetune wrote: {error!r}. Remove {folder}, and run it again."
        ) from error


def read(folder: Any) -> Tuned:
    """Return what a fine-tuned folder says.

    Raises:
        LlmError: the folder has no adapters, or no step is stored yet, or a file is damaged, or the
            base is not where it was.
    """
    if not is_finetuned(folder):
        raise LlmError(f"{folder} must have adapters: give a folder that finetune wrote.")
    folder, facts = Path(folder), read_facts(folder)
    if not (folder / STATE).is_file():
        raise LlmError(f"{folder} has no adapters yet. Run finetune with it again.")
    arrays, step = read_state(folder / STATE)
    base = folder / facts["base"]["folder"]
    if not base.exists():
        raise LlmError(
            f"{base} must be the base of {folder}, got nothing there. Put it there again."
        )
    lora, of = xla.Lora(**facts["adapters"]), facts["training"]["steps"]
    return Tuned(base, facts["base"]["name"], lora, step, of, adapters_in(arrays))


def names_of(adapters: Any) -> dict[str, Any]:
    """Return adapters by the names that they have in the file."""
    return {f"{_PART}{key}.{part}": array for key, pair in adapters.items()
            for part, array in pair.items()}  # fmt: skip


def adapters_in(arrays: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the adapters among the arrays of a file, as ``names_of`` takes them."""
    found: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        if name.startswith(_PART):
            key, _, part = name.removeprefix(_PART).rpartition(".")
            found.setdefault(key, {})[part] = array
    return found


def read_state(path: Path) -> tuple[dict[str, np.ndarray], int]:
    """Return the arrays of a checkpoint by name, and after how many steps it is.

    Raises:
        LlmError: it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            step = int(file.metadata()[_STEP])
            return {name: file.get_tensor(name) for name in file.keys()}, step  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise LlmError(
            f"{path} is corrupted: {error}. Remove it to train from the start."
        ) from error


def write_state(path: Path, arrays: dict[str, Any], step: int) -> None:
    """Write a checkpoint, which replaces the one before in one step."""
    from safetensors.numpy import save_file

    from provider_xla.file_formats import atomic_write

    # Not by ascontiguousarray, which makes vectors of scalars.
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    with atomic_write(path, overwrite=True) as new:
        save_file(arrays, new, {_STEP: str(step)})
