import importlib.util

# These are extras of the package.
collect_ignore_glob = []
if not all(map(importlib.util.find_spec, ("safetensors", "orbax"))):
    collect_ignore_glob += ["test_*"]
