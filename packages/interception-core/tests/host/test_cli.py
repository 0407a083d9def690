import json
import os
import subprocess
import sys
import types
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from interception_core import CommandSpec, PluginError, PluginRecord, ProviderSpec, TargetError
from interception_core.cli import main
from jaxtap_testkit.processes import run_python

OWN = PluginRecord("interception-core", "interception_core._plugin", "interception-core", "0.1.0")
BROKEN = PluginRecord("broken", "no_such_module_here", "broken-dist", "0.3")


@pytest.fixture
def commands(declare, monkeypatch):
    """A plugin whose commands run the given functions."""
    module = types.ModuleType("acme_commands")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def make(configure=None, **functions):
        specs = []
        if configure is not None:
            module.configure = configure
        for name, function in functions.items():
            setattr(module, name, function)
            path = f"{module.__name__}:{name}"
            options = None if configure is None else f"{module.__name__}:configure"
            specs.append(CommandSpec(name, f"does {name}, 100%", path, options))
        return declare("acme", jaxtap_register_commands=specs)

    return make


class TestHelp:
    def test_lists_the_commands_of_all_plugins(self, host, commands, capsys):
        host(OWN, commands(plan=print))
        assert main(["--help"]) == 0
        out = capsys.readouterr().out
        for text in ("doctor", "plugins", "plan", "does plan, 100%", "JAXTAP_STRICT_PLUGINS"):
            assert text in out

    def test_survives_a_broken_plugin(self, host, capsys):
        host(OWN, BROKEN)
        assert main(["--help"]) == 0
        captured = capsys.readouterr()
        assert "doctor" in captured.out
        assert captured.err.startswith("jaxtap: warning: plugin 'broken' (broken-dist 0.3) is left")
        assert captured.err.count("\n") == 1

    def test_is_what_no_arguments_get_too(self, host, capsys):
        host(OWN)
        assert main([]) == 2
        assert "usage: jaxtap" in capsys.readouterr().err

    def test_leaves_the_options_of_commands_alone(self, host, commands, capsys):
        host(commands(configure=pytest.fail, plan=print))
        assert main(["--help"]) == 0

    def test_of_a_command_has_its_options(self, host, commands, capsys):
        host(commands(configure=lambda parser: parser.add_argument("--bits"), plan=print))
        assert main(["plan", "--help"]) == 0
        out = capsys.readouterr().out
        assert "usage: jaxtap plan" in out
        assert "--bits" in out


def test_version(host, capsys):
    host(OWN)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("jaxtap (interception-core ")


class TestRunningACommand:
    @pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (3, 3)])
    def test_its_result_is_the_exit_status(self, host, commands, returned, status):
        host(commands(plan=lambda args: returned))
        assert main(["plan"]) == status

    def test_it_gets_its_options(self, host, commands, capsys):
        def configure(parser):
            parser.add_argument("--bits", type=int)

        host(commands(configure=configure, plan=lambda args: print(args.bits + 1)))
        assert main(["plan", "--bits", "4"]) == 0
        assert capsys.readouterr().out == "5\n"

    def test_a_wrong_option_is_a_usage_error(self, host, commands, capsys):
        host(commands(plan=print))
        assert main(["plan", "--no-such"]) == 2
        assert "--no-such" in capsys.readouterr().err

    def test_only_the_options_of_that_command_are_loaded(self, host, declare):
        host(
            OWN,
            declare(
                "acme",
                jaxtap_register_commands=[CommandSpec("bad", "is bad", "nowhere:x", "nowhere:y")],
            ),
        )
        assert main(["plugins"]) == 0

    @pytest.mark.parametrize("words", [["bad"], ["bad", "--help"]])
    def test_a_command_that_cannot_be_loaded(self, host, declare, capsys, words):
        spec = CommandSpec("bad", "is bad", "json:dumps", "no_such_module_here:y")
        host(declare("acme", jaxtap_register_commands=[spec]))
        assert main(words) == 1
        assert "Command 'bad' of plugin 'acme' (acme-dist 1.0): cannot load" in (
            capsys.readouterr().err
        )

    def test_a_result_that_is_no_status_is_refused(self, host, commands, capsys):
        host(commands(plan=lambda args: "done"))
        assert main(["plan"]) == 1
        assert "must return an int or None, got 'done'" in capsys.readouterr().err


class TestErrors:
    def test_of_jaxtap_are_one_line(self, host, commands, capsys, monkeypatch):
        def plan(args):
            raise TargetError("No such target.")

        monkeypatch.delenv("JAXTAP_DEBUG", raising=False)
        host(commands(plan=plan))
        assert main(["plan"]) == 1
        assert capsys.readouterr().err == "jaxtap: error: No such target.\n"

    def test_come_with_a_traceback_on_request(self, host, commands, capsys, monkeypatch):
        def plan(args):
            raise PluginError("Not that one.") from ValueError("the cause")

        monkeypatch.setenv("JAXTAP_DEBUG", "1")
        host(commands(plan=plan))
        assert main(["plan"]) == 1
        err = capsys.readouterr().err
        assert "Traceback" in err
        assert "ValueError: the cause" in err

    def test_nobody_who_reads_is_no_traceback(self):
        script = "python -m interception_core plugins | true; echo ${PIPESTATUS[0]}"
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        found = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, env=environment, check=True
        )
        assert found.stdout == "141\n"
        assert "Traceback" not in found.stderr
        assert "Broken" not in found.stderr

    def test_ctrl_c_is_one_line(self, host, commands, capsys, monkeypatch):
        def plan(args):
            raise KeyboardInterrupt

        monkeypatch.delenv("JAXTAP_DEBUG", raising=False)
        host(commands(plan=plan))
        assert main(["plan"]) == 130
        assert capsys.readouterr().err == "\njaxtap: interrupted\n"
        monkeypatch.setenv("JAXTAP_DEBUG", "1")
        with pytest.raises(KeyboardInterrupt):
            main(["plan"])

    def test_of_other_kinds_are_bugs_and_pass(self, host, commands):
        host(commands(plan=lambda args: 1 / 0))
        with pytest.raises(ZeroDivisionError):
            main(["plan"])

    def test_an_unknown_command(self, host, capsys):
        host(OWN)
        assert main(["plugns"]) == 2
        assert capsys.readouterr().err == (
            "jaxtap: error: Unknown command 'plugns'. Did you mean 'plugins'? "
            "Known commands: bench, completion, demo, doctor, new, ops, plugins.\n"
        )

    def test_a_command_of_a_failed_plugin(self, host, capsys):
        host(OWN, BROKEN)
        assert main(["broken"]) == 1
        assert "No module named 'no_such_module_here'" in capsys.readouterr().err

    def test_a_command_that_two_plugins_claim(self, host, declare, capsys):
        spec = CommandSpec("plugins", "a rival", "a:b")
        host(OWN, declare("acme", jaxtap_register_commands=[spec]))
        assert main(["plugins"]) == 1
        assert "JAXTAP_DISABLE_PLUGINS=acme" in capsys.readouterr().err
        assert main(["doctor", "--help"]) == 0


class TestCompletion:
    def test_has_commands_options_and_files(self, host, commands, declare, capsys):
        def configure(parser):
            parser.add_argument("source", metavar="FILE")
            parser.add_argument("--kind", choices={"one": 1, "two": 2})

        broken = CommandSpec("bad", "is bad", "nowhere:x", "nowhere:y")
        host(
            OWN,
            commands(configure=configure, plan=print),
            declare("other", jaxtap_register_commands=[broken]),
        )
        for shell in ("bash", "zsh", "tcsh"):
            assert main(["completion", shell]) == 0
            script = capsys.readouterr().out
            for word in ("doctor", "plan", "bad", "kind", "one", "two"):
                assert word in script, (shell, word)

    def test_completes_in_bash(self, host, commands, capsys, tmp_path):
        (tmp_path / "model.py").touch()
        host(
            commands(configure=lambda p: p.add_argument("source", metavar="FILE"), plan=print), OWN
        )
        assert main(["completion", "bash"]) == 0
        asked = (
            "COMP_WORDS=({words}); COMP_CWORD={at}; _shtab_jaxtap jaxtap {word} {before}; "
            'echo "${{COMPREPLY[@]}}"'
        )
        script = tmp_path / "script.sh"
        script.write_text(
            capsys.readouterr().out
            + "\n"
            + asked.format(words="jaxtap pl", at=1, word="pl", before="jaxtap")
            + "\n"
            + asked.format(words="jaxtap plan mo", at=2, word="mo", before="plan")
        )
        found = subprocess.run(
            ["bash", script], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert found.stdout.split() == ["plan", "plugins", "model.py"]

    def test_needs_shtab(self, host, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "shtab", None)
        host(OWN)
        assert main(["completion", "bash"]) == 1
        assert "needs shtab" in capsys.readouterr().err


class TestPlugins:
    def test_table(self, host, declare, capsys):
        spec = ProviderSpec("acme", "ternary", "a:b")
        host(
            declare("acme", jaxtap_register_providers=[spec]),
            declare("off"),
            BROKEN,
            OWN,
            JAXTAP_DISABLE_PLUGINS="off",
        )
        assert main(["plugins"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["name", "distribution", "version", "status", "provides"]
        assert lines[1].split() == ["acme", "acme-dist", "1.0", "ok", "provider:acme"]
        assert lines[2].split() == ["off", "off-dist", "1.0", "disabled", "-"]
        assert lines[3].split() == ["broken", "broken-dist", "0.3", "failed", "-"]
        assert lines[4].startswith("    import: ModuleNotFoundError: No module named")
        assert "engine:patch" in lines[5]

    def test_json(self, host, capsys):
        host(OWN, BROKEN)
        assert main(["plugins", "--json"]) == 0
        content = json.loads(capsys.readouterr().out)
        assert content["api"] == [1, 7]
        own, broken = content["plugins"]
        assert own["status"] == "ok"
        assert own["error"] is None
        assert "engine:patch" in own["provides"]
        assert broken == {
            "name": "broken",
            "distribution": "broken-dist",
            "version": "0.3",
            "module": "no_such_module_here",
            "status": "failed",
            "phase": "import",
            "error": {
                "type": "ModuleNotFoundError",
                "message": "No module named 'no_such_module_here'",
            },
            "provides": [],
            "notes": [],
        }

    def test_a_plugin_that_prints_does_not_spoil_the_json(self, host, declare, capsys):
        def loud():
            print("hello from a hook")
            return []

        host(OWN, declare("loud", jaxtap_register_providers=loud))
        assert main(["plugins", "--json"]) == 0
        captured = capsys.readouterr()
        assert len(json.loads(captured.out)["plugins"]) == 2
        assert "hello" in captured.err

    @pytest.mark.parametrize(("others", "status"), [((), 0), ((BROKEN,), 1)])
    def test_strictly_a_broken_plugin_is_shown_and_fails(self, host, capsys, others, status):
        host(OWN, *others, JAXTAP_STRICT_PLUGINS="1")
        assert main(["plugins"]) == status
        assert "engine:patch" in capsys.readouterr().out


class TestDemo:
    """``jaxtap demo``, which runs the command ``demo-NAME`` of a plugin."""

    @pytest.fixture
    def demos(self, declare, monkeypatch):
        """A plugin with demos of these names, which print their name and their options."""
        module = types.ModuleType("acme_demos")
        monkeypatch.setitem(sys.modules, module.__name__, module)

        def make(*names, distribution=None, configure=None):
            module.configure = configure
            specs = []
            for name in names:

                def run(args, name=name):
                    print(name, vars(args))
                    return 4

                setattr(module, name, run)
                options = None if configure is None else "acme_demos:configure"
                specs.append(CommandSpec(f"demo-{name}", "a demo", f"acme_demos:{name}", options))
            return declare("acme", distribution=distribution, jaxtap_register_commands=specs)

        return make

    @pytest.mark.parametrize(
        ("there", "words", "expected"),
        [
            (("odml", "xla"), [], "xla"),
            (("odml", "acme"), [], "acme"),
            (("odml", "xla"), ["--provider", "odml"], "odml"),
        ],
    )
    def test_runs_that_of_the_provider(self, host, demos, capsys, there, words, expected):
        host(OWN, demos(*there))
        assert main(["demo", *words]) == 4
        assert capsys.readouterr().out.startswith(f"{expected} ")

    def test_hands_its_options_over(self, host, demos, capsys):
        host(OWN, demos("xla"))
        words = ["--seed", "3", "--engine", "patch", "--json", "a.json"]
        assert main(["demo", *words]) == 4
        out = capsys.readouterr().out
        for text in ("'seed': 3", "'engine': 'patch'", "PosixPath('a.json')"):
            assert text in out

    def test_other_options_have_the_defaults_of_the_demo(self, host, demos, capsys):
        def configure(parser):
            parser.add_argument("--bits", type=int, default=4)
            parser.add_argument("--seed", type=int, default=99)

        host(OWN, demos("xla", configure=configure))
        assert main(["demo"]) == 4
        out = capsys.readouterr().out
        assert "'bits': 4" in out
        assert "'seed': 0" in out

    def test_an_unknown_provider(self, host, demos, capsys):
        host(OWN, demos("odml", "xla"))
        assert main(["demo", "--provider", "odlm"]) == 1
        assert capsys.readouterr().err == (
            "jaxtap: error: Unknown demo 'odlm'. Did you mean 'odml'? Known demos: odml, xla.\n"
        )

    def test_names_the_plugins_that_failed(self, host, demos, capsys):
        host(OWN, BROKEN, demos("xla"))
        assert main(["demo", "--provider", "broken"]) == 1
        err = capsys.readouterr().err
        assert "Unknown demo 'broken'. Known demos: xla. Failed: plugin 'broken'" in err

    def test_without_any_demo(self, host, capsys):
        host(OWN)
        assert main(["demo"]) == 1
        err = capsys.readouterr().err
        assert "A provider with a demo must be installed, got none" in err

    def test_one_that_two_plugins_claim(self, host, demos, declare, capsys):
        rival = CommandSpec("demo-odml", "a rival", "a:b")
        host(OWN, demos("odml", "xla"), declare("rival", jaxtap_register_commands=[rival]))
        assert main(["demo", "--provider", "odml"]) == 1
        assert "JAXTAP_DISABLE_PLUGINS=" in capsys.readouterr().err


class TestProcess:
    """What the installed command does, and that it does it without JAX."""

    def run(self, *words):
        code = (
            "import sys\n"
            "from interception_core.cli import main\n"
            "status = main(sys.argv[1:])\n"
            "assert 'jax' not in sys.modules and 'jaxlib' not in sys.modules\n"
            "sys.exit(status)\n"
        )
        others = {name: None for name in os.environ if name.startswith("JAXTAP_")}
        return run_python("-c", code, *words, check=False, **others)

    @pytest.mark.parametrize(
        "words",
        [["--help"], ["plugins"], ["plugins", "--json"], ["doctor", "--help"], ["demo", "--help"]],
    )
    def test_needs_no_jax(self, words):
        done = self.run(*words)
        assert done.returncode == 0, done.stderr
        assert done.stdout

    def test_importing_the_package_needs_no_jax(self):
        code = (
            "import sys, interception_core as c\n"
            "c.plugins, c.ProviderSpec, c.__version__, dir(c)\n"
            "assert 'jax' not in sys.modules, 'jax was imported'\n"
        )
        run_python("-c", code)

    def test_runs_as_a_module(self):
        done = run_python("-m", "interception_core", "no-such-command", check=False)
        assert done.returncode == 2
        assert "jaxtap: error: Unknown command 'no-such-command'" in done.stderr

    def test_is_installed_as_jaxtap(self):
        (script,) = entry_points(group="console_scripts", name="jaxtap")
        assert script.load() is main
