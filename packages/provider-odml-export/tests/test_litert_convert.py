import os
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtap_testkit.litert_samples import Layer, program
from provider_odml_export import ConversionError
from provider_odml_export.litert import Program, Runner, convert, converter, read

pytestmark = pytest.mark.sample(2)

X = np.arange(16, dtype=np.float32).reshape(4, 4) / 8


def double(x):
    return x * jnp.float32(2)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Where temporary folders are made, to see whether they are gone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def fake_worker(tmp_path_factory, monkeypatch):
    """Puts a script in the place of the worker."""

    def put(text):
        script = tmp_path_factory.mktemp("worker") / "worker.py"
        script.write_text(text)
        monkeypatch.setattr(converter, "WORKER", script)

    return put


@pytest.mark.slow
def test_one_program(folders):
    model = convert([program(double, X)])
    np.testing.assert_array_equal(Runner(model).run("main", a0=X)["o0"], X * 2)
    assert list(folders.iterdir()) == []


@pytest.mark.slow
def test_several_signatures_share_their_constants():
    layer = Layer.make("FULLY_CONNECTED")
    x, _ = layer.inputs()
    alone = read(convert([program(layer, x)]))
    both = read(convert([program(layer, x, name="one"), program(layer, x[:2], name="two")]))
    assert list(both.signatures) == ["one", "two"]
    assert [s.inputs["a0"].shape for s in both.signatures.values()] == [(32, 24), (2, 24)]
    assert both.bytes_by_dtype() == alone.bytes_by_dtype()


@pytest.mark.slow
def test_names_of_private_functions_do_not_collide():
    # A program named like a function inside it, and two with equal composites, which stay.
    def mine(x):
        return jax.nn.relu(jax.lax.composite(lambda y: jnp.sin(y) - y, name="mine.op")(x))

    model = convert([program(mine, X, name="relu"), program(mine, X, name="mine.op")])
    expected = np.maximum(np.sin(X) - X, 0)
    for name in ("relu", "mine.op"):
        found = Runner(model).run(name, a0=X)["o0"]
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.slow
def test_strict_or_not():
    layer = Layer.make("FULLY_CONNECTED")
    assert read(convert([program(layer, layer.inputs()[0])])).float_ops() == []
    assert read(convert([program(double, X)], strict=False)).op_counts() == {"MUL": 1}


def test_scan_and_nested_loops():
    def scanned(x):
        def step(carry, row):
            return jnp.sin(carry) + row * x[1], carry

        return jax.lax.scan(step, x[0], x)

    def nested(x):
        def outer(state):
            i, y = state
            inner = jax.lax.fori_loop(0, i, lambda j, z: z * x[0, 1] + y, y)
            return i + 1, inner

        return jax.lax.while_loop(lambda s: s[0] < 4, outer, (0, x))[1]

    model = convert([program(scanned, X, name="scan"), program(nested, X, name="nested")])
    runner = Runner(model)
    carry, before = X[0].astype(np.float64), []
    for row in X:
        before.append(carry)
        carry = np.sin(carry) + row * X[1]
    found = runner.run("scan", a0=X)
    np.testing.assert_allclose(found["o0"], carry, rtol=1e-5)
    np.testing.assert_allclose(found["o1"], before, rtol=1e-5)
    y = X.astype(np.float64)
    for i in range(4):
        z = y
        for _ in range(i):
            z = z * X[0, 1] + y
        y = z
    np.testing.assert_allclose(runner.run("nested", a0=X)["o0"], y, rtol=1e-5)


@pytest.mark.slow
def test_branches():
    def fn(x):
        return jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)

    runner = Runner(convert([program(fn, X)]))
    np.testing.assert_allclose(runner.run("main", a0=X)["o0"], np.cos(X), atol=1e-6)
    np.testing.assert_allclose(runner.run("main", a0=X + 1)["o0"], np.sin(X + 1), atol=1e-6)


@pytest.fixture
def places():
    """Let JAX write the lines of operations into a program, as it does for users."""
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, 10)
    yield
    jax.config.update(name, before)


@pytest.mark.usefixtures("places")
def test_an_operation_that_tflite_has_not_is_named_with_its_place(folders):
    def fn(x):
        with jax.named_scope("spectrum"):
            return jnp.fft.fft(x).real

    with pytest.raises(ConversionError, match=r"stablehlo\.fft .*spectrum.*test_litert_conv") as e:
        convert([program(fn, X)])
    assert "Failed to export" in e.value.log
    assert list(folders.iterdir()) == []


@pytest.mark.slow
def test_a_version_that_the_converter_can_not_read():
    one = program(double, X)
    head, version, rest = one.artifact.partition(b"StableHLO_v1.")
    artifact = head + b"StableHLO_v9." + rest[:-40]
    assert version
    with pytest.raises(ConversionError, match=r"StableHLO 9\.\d+\.0, and the converter has 1\.\d+"):
        convert([Program("main", artifact, ("a0",), ("o0",))])


def test_what_is_no_artifact():
    with pytest.raises(ConversionError, match="must be a StableHLO portable artifact"):
        convert([Program("main", b"func.func @main() {", (), ())])


def test_a_program_with_sharding():
    with pytest.raises(ConversionError, match="sdy dialect"):
        convert([program(jnp.linalg.cholesky, X)])


@pytest.mark.parametrize(
    ("inputs", "outputs", "match"),
    [
        (("a", "b"), ("o",), r"1 inputs and 1 outputs.*\['a', 'b'\]"),
        (("a",), (), r"1 inputs and 1 outputs.*\[\]"),
    ],
)
def test_names_that_do_not_fit_the_program(inputs, outputs, match):
    artifact = program(double, X).artifact
    with pytest.raises(ConversionError, match=match):
        convert([Program("main", artifact, inputs, outputs)])


@pytest.mark.parametrize(
    ("programs", "match"),
    [
        ([], "at least one"),
        ([Program("a", b"", (), ()), Program("a", b"", (), ())], "different names, at least"),
        ([Program("", b"", (), ())], "different names, at least"),
        ([Program("a", b"", ("x", "x"), ())], "inputs of .* must have different"),
        ([Program("a", b"", (), ("y", ""))], "outputs.*non-empty"),
    ],
)
def test_names_that_can_not_be(programs, match):
    with pytest.raises(ConversionError, match=match):
        convert(programs)


def test_a_crash(fake_worker, folders):
    fake_worker("import os, sys\nprint('assertion failed', flush=True)\nos.abort()")
    with pytest.raises(ConversionError, match="SIGABRT: assertion failed") as error:
        convert([program(double, X)])
    assert error.value.log == "assertion failed\n"
    assert list(folders.iterdir()) == []


def test_an_exit_without_a_result(fake_worker):
    fake_worker("import sys\nsys.exit(3)")
    with pytest.raises(ConversionError, match="status 3"):
        convert([program(double, X)])


def test_the_time_limit_ends_the_worker_and_its_children(
    monkeypatch, fake_worker, folders, tmp_path_factory
):
    note = tmp_path_factory.mktemp("pids") / "pid"
    fake_worker(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('at work', flush=True)\n"
        f"open({str(note)!r} + '.new', 'w').write(str(child.pid))\n"
        f"os.rename({str(note)!r} + '.new', {str(note)!r})\n"
        "time.sleep(600)\n"
    )
    communicate = converter.subprocess.Popen.communicate

    def at_work(self, *args, timeout=None):
        # The time starts when the worker is at work, however long a busy machine starts it.
        wait_for(lambda: timeout is None or note.exists())
        return communicate(self, *args, timeout=timeout)

    monkeypatch.setattr(converter.subprocess.Popen, "communicate", at_work)
    with pytest.raises(ConversionError, match=r"must end within 0\.5 s") as error:
        convert([program(double, X)], timeout=0.5)
    assert error.value.log == "at work\n"
    assert list(folders.iterdir()) == []
    wait_for(lambda: has_ended(note.read_text()))


def has_ended(pid):
    """It is gone, or dead and not yet collected by whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_an_interrupt_ends_the_worker(monkeypatch):
    seen = []

    def interrupted(self, *args, **kwargs):
        if not seen:
            seen.append(self.pid)
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    original = converter.subprocess.Popen.communicate
    monkeypatch.setattr(converter.subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert([program(double, X)])
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], signal.SIG_DFL)
