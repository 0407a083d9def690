"""``jaxtap new``: what it writes is built, installed and green, and its tests can fail."""

import json
import os
import re
import shutil
import subprocess
from importlib import metadata

import pytest

from interception_core.cli import main
from jaxtap_testkit.processes import run_python
from jaxtap_testkit.wheels import install_wheel

UV = os.environ.get("UV") or shutil.which("uv")
KINDS = ["provider", "kernel", "bridge", "format"]
# A fault of each, as a change to its text, and some of the tests that must fail for it.
FAULTS = {
    "does nothing": (
        "provider/provider.py",
        "proceed(lhs, rounded(rhs, contracted, self.bits).array(), **params)",
        "proceed(lhs, rhs, **params)",
        ["test_changes_the_result_a_little", "test_the_float_function_stays_as_it_is"],
    ),
    "does not tap under jit": (
        "provider/provider.py",
        "get_engine(self.engine)",
        'get_engine("patch")',
        ["test_jit_inside", "test_loops"],
    ),
    "stores something else than it says": (
        "provider/provider.py",
        "jax.eval_shape(self._round, x)",
        "x",
        ["test_plan_is_stored", "test_what_is_stored_is_saved_and_loaded"],
    ),
    "forgets its bits": (
        "provider/provider.py",
        '"config": {"bits": self.provider.bits}',
        '"config": {}',
        ["test_what_is_stored_is_saved_and_loaded"],
    ),
    "is too coarse": (
        "format/formats.py",
        "(-1.0, -0.6, -0.35, -0.15, 0.0, 0.2, 0.5, 1.0)",
        "(-1.0, 0.0, 1.0)",
        ["test_error"],
    ),
    "does not use the parameters": (
        "bridge/bridge.py",
        "                _with(model, parameters), *args",
        "                model, *args",
        ["test_function_is_the_method", "test_trained_quantized"],
    ),
    "has a wrong kernel": (
        "kernel/op.py",
        "call(x, scale=np.float32(scale))",
        "call(x, scale=np.float32(scale + 1e-3))",
        ["test_equals_the_reference", "test_jit", "test_scan"],
    ),
}
# A test of each that none of these faults breaks.
PASSES = {
    "provider": "test_bits_are_checked",
    "kernel": "test_it_can_be_registered_more_than_once",
    "bridge": "test_parameters_are_the_model_s_arrays",
    "format": "test_zero",
}


@pytest.fixture
def made(built_once):
    """Return ``get(kind)``: a folder with ``source``, and the installed wheel in ``site``."""

    def get(kind):
        def build(folder):
            source, dist = folder / "source", folder / "dist"
            assert main(["new", kind, f"acme-{kind}", "--dir", str(source)]) == 0
            done = subprocess.run(
                [UV, "build", "--wheel", "--quiet", source, "-o", dist],
                capture_output=True,
                text=True,
                timeout=900,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            (wheel,) = dist.glob("*.whl")
            install_wheel(wheel, folder / "site")

        return built_once(f"new-{kind}", build)

    return get


def run_tests(source, site, *words, check=True):
    """Run a distribution's own tests, in a process; return what pytest prints."""
    options = ["-q", "-rfE", "-p", "no:cacheprovider", "-p", "no:jaxtap_testkit", "--rootdir"]
    return run_python(
        "-c",
        "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))",
        *[*options, source, source / "tests", *words],
        PYTHONPATH=str(site),
        check=check,
        strict=False,
    ).stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_is_green(made, kind):
    folder = made(kind)
    assert re.search(r"\d{2} passed", run_tests(folder / "source", folder / "site"))


@pytest.mark.slow
def test_all_are_found(made):
    sites = os.pathsep.join(str(made(kind) / "site") for kind in KINDS)
    code = "from interception_core.cli import main\nmain(['plugins'])\nmain(['doctor'])"
    printed = run_python("-c", code, PYTHONPATH=sites).stdout
    for kind in KINDS:
        assert re.search(rf"acme-{kind} .*ok", printed)
    assert "0 fail" in printed


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_its_tests_can_fail(made, fault, tmp_path):
    path, right, wrong, tests = FAULTS[fault]
    kind, file = path.split("/")
    shutil.copytree(made(kind) / "site", tmp_path / "site")
    target = tmp_path / "site" / f"acme_{kind}" / file
    assert right in target.read_text()
    target.write_text(target.read_text().replace(right, wrong))
    words = ["--tb=no", "-k", " or ".join([*tests, PASSES[kind]])]
    said = run_tests(made(kind) / "source", tmp_path / "site", *words, check=False)
    failed = re.findall(r"^FAILED \S*::(test_\w+)", said, re.MULTILINE)
    assert set(tests) <= set(failed), said
    assert re.search(r"\d passed", said), "a suite that fails everything shows nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_whole(kind, tmp_path, capsys):
    folder = tmp_path / "new"
    assert main(["new", kind, "acme-two-words", "--dir", str(folder)]) == 0
    assert f"cd {folder}" in capsys.readouterr().out
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert {"README.md", "pyproject.toml", ".gitignore", ".github/workflows/test.yml"} <= set(files)
    assert {"acme_two_words/plugin.py", "tests/test_conformance.py"} <= set(files)
    for path in files.values():
        text = path.read_text()
        assert "@@" not in text
        if path.suffix == ".py":
            compile(text, str(path), "exec")
    assert list(tmp_path.iterdir()) == [folder]


def direct_url(name, text):
    """Return a distribution that is installed from a URL; None for an index."""

    class Installed(metadata.Distribution):
        def read_text(self, filename):
            if filename == "METADATA":
                return f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
            return text if filename == "direct_url.json" else None

        def locate_file(self, path):
            raise NotImplementedError

    return Installed()


@pytest.mark.parametrize(
    ("found", "place"),
    [
        (None, None),
        ({"url": "HERE", "dir_info": {"editable": True}}, "-e 'HERE'"),
        ({"url": "HERE", "dir_info": {}}, "'HERE'"),
        ({"url": "HERE", "archive_info": {}}, "'HERE'"),
        ({"url": "HERE/gone", "dir_info": {}}, None),
        (
            {
                "url": "https://example.org/x",
                "vcs_info": {"vcs": "git", "commit_id": "abc"},
                "subdirectory": "packages/core",
            },
            "'interception-core @ git+https://example.org/x@abc#subdirectory=packages/core'",
        ),
        (
            {"url": "https://example.org/x.whl", "archive_info": {}},
            "'interception-core @ https://example.org/x.whl'",
        ),
    ],
)
def test_the_install_line_names_what_no_index_has(tmp_path, capsys, monkeypatch, found, place):
    folder = tmp_path / "a checkout"
    folder.mkdir()
    text = None if found is None else json.dumps(found).replace("HERE", folder.as_uri())

    def distribution(name):
        if name != "interception-core":
            raise metadata.PackageNotFoundError(name)
        return direct_url(name, text)

    monkeypatch.setattr("importlib.metadata.distribution", distribution)
    assert main(["new", "bridge", "acme-bridge", "--dir", str(tmp_path / "new")]) == 0
    (line,) = re.findall("uv pip install.*", capsys.readouterr().out)
    named = [] if place is None else [place.replace("HERE", str(folder))]
    assert line == " ".join(["uv pip install", *named, "-e '.[test]'"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["provider", "Acme"], "lower-case words with hyphens"),
        (["provider", "acme_quant"], "lower-case words with hyphens"),
        (["provider", "class"], "lower-case words with hyphens"),
        (["provider", "../x"], "lower-case words with hyphens"),
        (["provider", "acme", "--dir", "{}"], "must not exist, got"),
        (["provider", "acme", "--dir", "{}/no/x"], "must exist, got"),
    ],
)
def test_wrong_input(tmp_path, capsys, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(["new", *(word.replace("{}", str(tmp_path)) for word in words)]) == 1
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_where_it_can_not_be_written(tmp_path, capsys, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    assert main(["new", "provider", "acme", "--dir", str(tmp_path / "acme")]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
