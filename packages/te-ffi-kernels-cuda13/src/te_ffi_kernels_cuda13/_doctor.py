"""What ``jaxtap doctor`` says of the CUDA kernels."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from interception_core import CheckResult

from . import _cublas, _cudnn, _gemm, _gpus, _status

_PLUGIN = "jax-cuda13-plugin"
_OTHERS = ("jax-cuda12-plugin",)


def cuda() -> Iterator[CheckResult]:
    """Tell whether there are kernels, and whether JAX's plugin and the driver go with them."""
    if not _status.built():
        yield CheckResult("ok", _status.status())
        return
    native = _status.native()
    driver = native.driver_version()
    plugin = _installed(_PLUGIN)
    if driver == 0:
        # A machine without a GPU is none that something is wrong with.
        yield CheckResult("ok", _status.status())
    elif driver // 1000 < native.CUDA_VERSION // 1000:
        yield CheckResult("fail", _status.status(), "upgrade NVIDIA's driver")
    else:
        yield CheckResult("ok", _status.status())
    yield from _jax(plugin, gpu=driver != 0)
    if driver != 0:
        yield from _devices()
        yield from _libraries()


def _devices() -> Iterator[CheckResult]:
    """Tell whether a GPU is too old for the kernels."""
    why = _gpus.unfit(_gpus.OLDEST)
    if why is not None:
        yield CheckResult(
            "warn",
            f"{why}; ops run as plain JAX on all GPUs of this process",
            "hide older GPUs with CUDA_VISIBLE_DEVICES, if there are newer ones",
        )


def _libraries() -> Iterator[CheckResult]:
    """Tell whether the libraries are there that matmuls and attention are computed with."""
    for name, module, package, ops in (
        ("cuBLASLt", _cublas, "nvidia-cublas", "matmuls"),
        ("cuDNN", _cudnn, "nvidia-cudnn-cu13", "attention"),
    ):
        why = module.missing()
        if why is None:
            yield CheckResult("ok", f"{name} is {_cudnn.dotted(module.loaded()[0])}")
            if module is _cublas:
                yield from _matmuls()
        else:
            yield CheckResult(
                "warn", f"{why}; {ops} run as plain JAX", f"install {package}, as jax[cuda13] does"
            )


def _matmuls() -> Iterator[CheckResult]:
    """Tell which kinds of matmul cuBLASLt refuses on the GPUs here, which run as plain JAX then."""
    capability = min(_gpus.used().values(), default=0)
    for lhs, rhs, mode, needed in _gemm.KINDS:
        if capability < needed:
            continue
        what = f"matmuls of {lhs} with {rhs}, scaling_mode {mode}"
        why = _gemm.refused_kind(lhs, rhs, mode)
        if why is not None:
            yield CheckResult(
                "warn", f"{what}, run as plain JAX: {why}", "try another version of nvidia-cublas"
            )


def _jax(plugin: str | None, *, gpu: bool) -> Iterator[CheckResult]:
    """Tell whether JAX can use the kernels."""
    if plugin is None:
        other = next((name for name in _OTHERS if _installed(name)), None)
        found = f"JAX has {other}" if other else "JAX has no CUDA plugin"
        yield CheckResult(
            "warn" if gpu else "ok",
            f"{found}; the kernels run beside {_PLUGIN}",
            "install jax[cuda13]" if gpu else "",
        )
        return
    jaxlib = _installed("jaxlib")
    same = jaxlib is not None and plugin.split(".")[:2] == jaxlib.split(".")[:2]
    yield CheckResult(
        "ok" if same else "fail",
        f"{_PLUGIN} is {plugin}, and jaxlib is {jaxlib}",
        "" if same else f"install {_PLUGIN} of jaxlib's version",
    )
    if not gpu:
        return
    import jax

    try:
        devices = jax.devices("cuda")
    except RuntimeError as error:
        message = (str(error) or "no cuda backend").splitlines()[0]
        yield CheckResult("warn", f"JAX finds no GPU: {message}")
        return
    kinds = sorted({device.device_kind for device in devices})
    yield CheckResult("ok", f"JAX finds {len(devices)} of: {', '.join(kinds)}")


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
