import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# These are extras of the package.
collect_ignore_glob = []
if not all(map(importlib.util.find_spec, ("safetensors", "orbax"))):
    collect_ignore_glob += ["test_*"]
