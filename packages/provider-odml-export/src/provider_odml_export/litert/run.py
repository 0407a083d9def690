"""Running a .tflite on this machine, in the file's types."""

from __future__ import annotations

import importlib
import re

import numpy as np

from provider_odml import OdmlError

from .model import Model, Signature, Tensor
from .reader import read


class Runner:
    """An interpreter of one .tflite.

    Args:
        model: the .tflite.
        threads: how many it may use.
        reference_kernels: run the built-in kernels, written for clarity, instead of XNNPACK's.
        preserve_all_tensors: keep what is between the operations, for `tensor`. Without XNNPACK,
            whose operations have nothing between them.

    Raises:
        OdmlError: the model can't be loaded.
    """

    model: Model

    def __init__(
        self,
        model: bytes,
        *,
        threads: int = 1,
        reference_kernels: bool = False,
        preserve_all_tensors: bool = False,
    ):
        litert = importlib.import_module("ai_edge_litert.interpreter")  # it has no types
        self.model = read(model)
        kinds = litert.OpResolverType
        kind = kinds.BUILTIN
        if preserve_all_tensors:
            kind = kinds.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        if reference_kernels:
            kind = kinds.BUILTIN_REF
        try:
            self._interpreter = litert.Interpreter(
                model_content=model,
                num_threads=threads,
                experimental_op_resolver_type=kind,
                experimental_preserve_all_tensors=preserve_all_tensors,
            )
            self._runners = {
                name: self._interpreter.get_signature_runner(name) for name in self.model.signatures
            }
        except (RuntimeError, ValueError) as error:
            raise OdmlError(f"LiteRT can't load the model: {_explained(error)}") from error
        self._preserves = preserve_all_tensors
        self._last: int | None = None

    def details(self, signature: str) -> Signature:
        """Return a signature's inputs and outputs.

        Raises:
            OdmlError: the file lacks the signature.
        """
        try:
            return self.model.signatures[signature]
        except KeyError:
            known = ", ".join(map(repr, self.model.signatures)) or "none"
            raise OdmlError(f"signature must be one of {known}, got {signature!r}.") from None

    def run(self, signature: str, /, **inputs: np.ndarray) -> dict[str, np.ndarray]:
        """Run a signature.

        Args:
            signature: its name.
            **inputs: all its inputs, of the shapes and types that the file has.

        Returns:
            The outputs, typed as in the file: integers are not dequantized.

        Raises:
            OdmlError: the file lacks the signature, the inputs are not those of it, or a kernel
                failed.
        """
        one = self.details(signature)
        # The interpreter reads memory as it lies, whatever the strides.
        values = {name: np.asarray(value, order="C") for name, value in inputs.items()}
        faults = _faults(one.inputs, values)
        if faults:
            raise OdmlError(f"Inputs of signature {signature!r}: {'; '.join(faults)}.")
        try:
            found = self._runners[signature](**values)
        except (RuntimeError, ValueError) as error:
            raise OdmlError(f"LiteRT can't run {signature!r}: {_explained(error)}") from error
        self._last = one.subgraph
        return {name: np.array(found[name]) for name in one.outputs}

    def tensor(self, index: int, subgraph: int | None = None) -> np.ndarray:
        """Return what a tensor had in the last run.

        Args:
            index: of the tensor.
            subgraph: its subgraph's index; that of the last run when left out.

        Raises:
            OdmlError: nothing was run, or tensors are not preserved.
        """
        if not self._preserves or self._last is None:
            raise OdmlError("tensor must be asked for after a run with preserve_all_tensors=True.")
        graph = self._last if subgraph is None else subgraph
        try:
            return np.array(self._interpreter.get_tensor(index, graph))
        except (RuntimeError, ValueError) as error:
            raise OdmlError(f"Tensor {index} has no values: {_explained(error)}") from error


def _faults(expected: dict[str, Tensor], given: dict[str, np.ndarray]) -> list[str]:
    """Return what is wrong with inputs, in words."""
    missing = [name for name in expected if name not in given]
    unknown = [name for name in given if name not in expected]
    faults = []
    if missing:
        faults.append(f"{missing} are missing")
    if unknown:
        faults.append(f"{unknown} are unknown, it has {list(expected)}")
    for name in expected.keys() & given.keys():
        tensor, value = expected[name], given[name]
        fits = len(tensor.shape) == value.ndim and all(
            size in (-1, actual) for size, actual in zip(tensor.shape, value.shape, strict=True)
        )
        kind = "int8" if tensor.dtype in ("int4", "int2") else tensor.dtype
        if not fits or value.dtype.name != kind:
            faults.append(
                f"{name!r} must be {tensor.dtype}{list(tensor.shape)}, got"
                f" {value.dtype.name}{list(value.shape)}"
            )
    return sorted(faults)


def _explained(error: Exception) -> str:
    """Return what LiteRT says, and what to do about an operation that it has no kernel for."""
    said = str(error).strip()
    text = said.partition("\n")[0].rstrip(".?") or type(error).__name__
    # The converter keeps what it knows no operation of LiteRT for, as it is.
    missing = re.search(r"STABLEHLO_(\w+)", said)
    if missing is None:
        return text
    return (
        f"{text}. LiteRT has no kernel for StableHLO's {missing[1].lower()}. Write it in other "
        "operations, or compute it outside of the exported function."
    )
