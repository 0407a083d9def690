"""A plugin with CUDA kernels that are lowered and never run."""

from interception_core import KernelSpec, hookimpl

API = (1, 3)
OPS = ("gemm_w8a8", "gemm_w8a16", "gemm_w4a16", "pack_w8", "pack_w4")
WITHOUT = {"te-ffi-kernels-cuda13"}
"""The plugin whose place this one takes."""


@hookimpl
def jaxtap_register_kernels():
    return [
        KernelSpec(
            target=f"fake_cuda.{op}",
            platform="cuda",
            handlers="jaxtap_testkit.fake_cuda:handlers",
            op=op,
            supports="jaxtap_testkit.fake_cuda:supports",
        )
        for op in OPS
    ]


def supports(call):
    """Tell whether groups have a multiple of 8 rows, and there is nothing but a weight."""
    if any(map(call.param, ("index", "group_sizes", "bias", "residual", "clamps"))):
        return "more than x and a weight"
    return call.param("group", 0) % 8 == 0 or "groups"
