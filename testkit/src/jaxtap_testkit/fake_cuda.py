"""A plugin with CUDA kernels that are lowered and never run."""

from interception_core import KernelSpec, hookimpl

API = (1, 3)
OPS = ("gemm_w8a8", "gemm_w8a16", "gemv_w8", "gemv_w4", "pack_w8", "pack_w4")
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
    """As te-ffi-kernels-cuda13: groups of a multiple of 8 rows."""
    return call.param("group", 0) % 8 == 0 or "groups"
