"""Third parties' distributions, built, installed and used by name in another process.

The first is the example of docs/plugins.md, word for word.
"""

import json
import os

import pytest

from jaxtap_testkit.processes import run_python
from jaxtap_testkit.wheels import build_wheel, install_wheel

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{distribution}"
version = "2.0"
dependencies = ["interception-core"]

[project.entry-points.jaxtap]
{name} = "{package}.plugin"

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
"""

# A provider without JAX in it, so that most of the processes below need not import it.
RIVAL = """
from interception_core import ProviderSpec, hookimpl

API = (1, 0)

class Rival:
    engine, disable_jit = "patch", False
    def interceptor(self): ...
    def apply(self, fn): return fn

@hookimpl
def jaxtap_register_providers():
    return [ProviderSpec(name, "a rival", "rival_quant.plugin:Rival") for name in ("acme", "rival")]
"""

PLUGINS = {
    "broken": "import no_such_module_here",
    "misspelt": (
        "from interception_core import hookimpl\n"
        "API = (1, 0)\n"
        "@hookimpl\n"
        "def jaxtap_register_provider():\n    return []\n"
    ),
    "future": "API = (2, 0)",
    "lazy": "import jax\nAPI = (1, 0)",
    "rival": RIVAL,
}


@pytest.fixture(scope="session")
def wheel_of(built_once, guide_blocks):
    """Builds a plugin's wheel, when a test first asks for it."""

    def wheel(name):
        files = {path: text for path, text in guide_blocks.items() if "." in path}
        if name != "acme":
            files = project(name, PLUGINS[name])
        built = built_once(f"wheel-{name}", lambda folder: build_wheel(folder, files))
        return next((built / "dist").glob("*.whl"))

    return wheel


def project(name, source):
    package = f"{name}_quant"
    return {
        "pyproject.toml": PYPROJECT.format(
            distribution=f"{name}-quant", name=name, package=package
        ),
        f"{package}/__init__.py": "",
        f"{package}/plugin.py": source,
    }


@pytest.fixture
def python(wheel_of, tmp_path):
    """Runs Python where the given plugins are installed, beside what this environment has."""

    def run(*words, installed, **options):
        for name in installed:
            install_wheel(wheel_of(name), tmp_path / "site")
        others = {name: None for name in os.environ if name.startswith("JAXTAP_")}
        environment = others | {"PYTHONPATH": str(tmp_path / "site")} | options
        return run_python(*words, strict=False, timeout=300, **environment)

    return run


def listed(done):
    """What `jaxtap plugins --json` said, by plugin name."""
    return {record["name"]: record for record in json.loads(done.stdout)["plugins"]}


JAXTAP = ("-m", "interception_core")


@pytest.mark.slow
def test_a_provider_from_its_own_distribution_runs_by_name(python, guide_blocks):
    code = (
        "import sys\n"
        "from interception_core import ProviderSpec, declared_specs\n"
        "assert 'acme' in [spec.name for spec in declared_specs(ProviderSpec)]\n"
        "assert 'jax' not in sys.modules and 'acme_quant.provider' not in sys.modules\n"
    )
    python("-c", code + guide_blocks["use"], installed=["acme"])


def test_a_command_from_its_own_distribution_runs_by_name(python):
    assert "how small" in python(*JAXTAP, "--help", installed=["acme"]).stdout
    assert "elements" in python(*JAXTAP, "acme", "--help", installed=[]).stdout
    assert python(*JAXTAP, "acme", "1024", installed=[]).stdout == "4096 bytes become 132\n"


@pytest.mark.slow
def test_the_errors_of_the_guide(python, guide_blocks):
    python("-W", "ignore", "-c", guide_blocks["errors"], installed=[])


@pytest.mark.slow
def test_broken_plugins_break_nothing_else(python):
    installed = ["acme", "broken", "misspelt", "future"]
    done = python(*JAXTAP, "plugins", "--json", installed=installed)
    found = listed(done)
    assert {name: (found[name]["status"], found[name]["phase"]) for name in installed} == {
        "acme": ("ok", "declare"),
        "broken": ("failed", "import"),
        "misspelt": ("failed", "hooks"),
        "future": ("failed", "api"),
    }
    assert found["acme"]["distribution"] == "acme-quant"
    assert found["broken"]["version"] == "2.0"
    assert found["broken"]["error"]["type"] == "ModuleNotFoundError"
    assert "Did you mean 'jaxtap_register_providers'?" in found["misspelt"]["error"]["message"]
    assert "Upgrade interception-core" in found["future"]["error"]["message"]
    for name in installed[1:]:
        assert done.stderr.count(f"plugin '{name}'") == 1

    code = """if True:
        import warnings
        from interception_core import PluginError, PluginWarning, UnknownNameError, get_provider

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert get_provider("acme", scaled=False).scaled is False
            get_provider("acme")
        lines = [str(one.message) for one in caught if one.category is PluginWarning]
        for name in ("broken", "misspelt", "future"):
            assert len([line for line in lines if f"plugin {name!r}" in line]) == 1, lines

        try:
            get_provider("broken")
        except PluginError as error:
            assert isinstance(error.__cause__, ModuleNotFoundError)
            assert error.__cause__.__traceback__ is not None
            assert "broken-quant 2.0" in str(error)
        else:
            raise AssertionError("get_provider('broken') did not raise")

        try:
            get_provider("no-such-provider")
        except UnknownNameError as error:
            assert "acme" in error.known
            assert "misspelt-quant" in str(error)
            assert error.__cause__ is not None
        else:
            raise AssertionError("an unknown name did not raise")
    """
    python("-c", code, installed=[])


@pytest.mark.slow
def test_a_name_that_two_distributions_claim(python):
    ask = ("-c", "import sys, interception_core as c; c.get_provider(sys.argv[1])")
    done = python(*ask, "acme", installed=["acme", "rival"], check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    for part in (
        "PluginError",
        "acme-quant 1.0",
        "rival-quant 2.0",
        "JAXTAP_DISABLE_PLUGINS=rival",
    ):
        assert part in last

    python("-W", "ignore", *ask, "rival", installed=[])
    python(*ask, "acme", installed=[], JAXTAP_DISABLE_PLUGINS="acme")

    found = listed(python(*JAXTAP, "plugins", "--json", installed=[]))
    assert (found["acme"]["status"], found["rival"]["status"]) == ("conflict", "conflict")


@pytest.mark.slow
def test_a_disabled_plugin_is_not_imported(python):
    environ = {"JAXTAP_DISABLE_PLUGINS": "broken"}
    done = python(*JAXTAP, "plugins", "--json", installed=["broken"], **environ)
    assert listed(done)["broken"]["status"] == "disabled"
    assert "broken" not in done.stderr


@pytest.mark.slow
def test_strict_refuses_to_go_on(python):
    code = "import interception_core; interception_core.plugins()"
    python("-c", code, installed=["broken"])
    done = python("-c", code, installed=[], check=False, JAXTAP_STRICT_PLUGINS="1")
    assert done.returncode == 1
    assert "broken-quant 2.0" in done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_importing_jax_while_declaring_is_noticed(python):
    done = python(*JAXTAP, "plugins", "--json", installed=["lazy"])
    record = listed(done)["lazy"]
    assert record["status"] == "ok"
    assert "must not import jax, and it does" in record["notes"][0]
    assert "must not import jax, and it does" in done.stderr


@pytest.mark.slow
def test_what_a_failing_command_prints(python):
    done = python(*JAXTAP, "broken", installed=["broken"], check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("jaxtap: error: No command 'broken'")
    assert "Traceback" not in done.stderr
    done = python(*JAXTAP, "broken", installed=[], check=False, JAXTAP_DEBUG="1")
    assert "Traceback" in done.stderr
    assert "no_such_module_here" in done.stderr
