"""What is not collected where parts of the project are not installed."""

import importlib.util

# Without a C++ compiler there is no te-ffi-kernels, and everything else works.
collect_ignore_glob = []
if importlib.util.find_spec("te_ffi_kernels") is None:
    collect_ignore_glob += ["packages/te-ffi-kernels/*", "tests/test_kernel*"]
    collect_ignore_glob += ["packages/te-ffi-kernels-cuda13/*"]
