"""A bridge from a distribution of its own: the one of docs/bridges.md, word for word."""

import re
from pathlib import Path

import pytest

from jaxtap_testkit.processes import run_python
from jaxtap_testkit.wheels import build_wheel, install_wheel

GUIDE = Path(__file__).parent.parent / "docs" / "bridges.md"

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "acme-nn"
version = "1.0"
dependencies = ["provider-xla"]

[project.entry-points.jaxtap]
acme = "acme_nn.plugin"

[tool.hatch.build.targets.wheel]
packages = ["acme_nn"]
"""

# The framework knows nothing of jaxtap. Its model is below the package that the spec names.
MODEL = """
class Model:
    def __init__(self, w):
        self.weights = {"w": w}

    def __call__(self, x):
        return x @ self.weights["w"]
"""


@pytest.fixture(scope="module")
def site(built_once):
    """A folder that the wheel is installed in."""
    blocks = dict(re.findall(r"```python\n# (acme_nn/\S+)\n(.*?)```", GUIDE.read_text(), re.DOTALL))
    assert set(blocks) == {"acme_nn/bridge.py", "acme_nn/plugin.py"}
    blocks |= {
        "acme_nn/__init__.py": "",
        "acme_nn/model.py": MODEL,
        "pyproject.toml": PROJECT,
    }

    def build(folder):
        install_wheel(build_wheel(folder / "source", blocks), folder / "site")

    return built_once("bridge", build) / "site"


def run(code, site, **environment):
    return run_python("-c", code, PYTHONPATH=str(site), **environment).stdout


def test_it_is_found_and_used(site):
    (use,) = re.findall(r"```py\n# use\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    imports_nothing = (
        "import sys, interception_core as c\n"
        "names = [spec.name for spec in c.declared_specs(c.BridgeSpec)]\n"
        "assert names == ['acme', 'equinox', 'linen', 'nnx']\n"
        "assert not {'jax', 'flax', 'equinox', 'acme_nn.bridge'} & set(sys.modules)\n"
    )
    # Nor does quantizing a model of one framework import another.
    others = "import sys\nassert not {'flax', 'equinox'} & set(sys.modules)\n"
    run(imports_nothing + use + others, site)


@pytest.mark.slow
def test_without_the_plugin_the_message_lists_the_others(site):
    code = """if True:
        import interception_core as c, provider_xla as xla
        from acme_nn.model import Model
        try:
            xla.quantize_model(Model(1.0), xla.PtqProvider(), 1.0)
        except c.UnknownNameError as error:
            print(error)
    """
    said = run(code, site, JAXTAP_DISABLE_PLUGINS="acme")
    assert "a class that a bridge is for, got a acme_nn.model.Model" in said
    assert "'nnx' for flax.nnx.Module (provider-xla[nnx])" in said
    assert "jaxtap_register_bridges" in said
