from jaxtap_testkit.strict import strict_dtypes, strict_ranks  # noqa: F401
from jaxtap_testkit.te import cpu_tests

# On a GPU the ops pass the tests of te-ffi-kernels, which are in a checkout alone.
collect_ignore_glob = [] if cpu_tests.FOLDER.exists() else ["test_gpu_*"]
