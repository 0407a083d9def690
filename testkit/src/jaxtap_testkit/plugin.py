"""The pytest plugin of jaxtap's tests.

``pytest`` runs the default tier, ``pytest --full`` everything. A test says where it is written what
the default tier leaves out of it:

- ``@pytest.mark.slow``: the test;
- ``@pytest.mark.sample(n)``: all but n of its cases, evenly spread;
- ``@examples(n)``, a Hypothesis test: most of its n examples.

``pytest --full -m "slow or generated"`` runs what the default tier left out.
"""

import gc
import itertools

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from . import budget, tiers

DEVICES = 8
MODULES = itertools.count(1)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the full tier of the tests")
    parser.addoption(
        "--cpu-file", metavar="FILE", help="write the CPU seconds of each test, as JSON"
    )


def pytest_configure(config):
    config.pluginmanager.register(budget.Recorder(config), "jaxtap-budget")
    # JAX makes hundreds of thousands of objects that stay: Python would look at them all the time.
    gc.set_threshold(100_000, 20, 20)
    config.addinivalue_line("filterwarnings", "error")
    for marker in (
        "slow: in the full tier alone",
        "sample(n): n cases of the test are in the default tier, all in the full one",
        "generated: has more examples in the full tier; set by jaxtap_testkit.examples",
        "optimized: compiled as for users, since bits or speed are the subject",
        "gpu: needs a GPU, and the kernels of te-ffi-kernels-cuda13",
    ):
        config.addinivalue_line("markers", marker)
    # A machine that is busy with something else fails no test.
    settings.register_profile("jaxtap", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("jaxtap")
    # A test that is asked for by name runs whole.
    tiers.full = config.option.full or any("::" in arg for arg in config.args)
    import jax

    from . import compat

    compat.compile_cheaply()
    kept = config.cache.mkdir("jaxtap-programs") if hasattr(config, "cache") else None
    if kept is not None and not hasattr(config, "workerinput"):
        compat.forget_old_programs(kept)
    compat.compile_once(kept)
    compat.lower_cheaply()
    compat.make_arrays_cheaply()
    compat.explain_leaks()
    # Without the lines where operations are written, equal programs have equal texts.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    # Sharding is tested in the process of the test: there's nothing to start and to import again.
    jax.config.update("jax_num_cpu_devices", DEVICES)


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(config, items):
    cases = {}
    for item in items:
        if item.get_closest_marker("sample"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        (count,) = same[0].get_closest_marker("sample").args
        kept = {round(i * (len(same) - 1) / max(count - 1, 1)) for i in range(count)}
        for i, item in enumerate(same):
            if i not in kept:
                item.add_marker("slow")
    if not tiers.full:
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_collection_finish():
    # What was imported and collected stays: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _compiler(request):
    """Compile with XLA's usual passes in tests marked ``optimized``."""
    from . import compat

    with compat.compiling(cheap="optimized" not in request.keywords):
        yield


@pytest.fixture(scope="module", autouse=True)
def _small_process():
    """Forget compiled programs after every fortieth module."""
    yield
    if next(MODULES) % 40 == 0:
        import jax

        jax.clear_caches()
        gc.unfreeze()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="module")
def own_programs():
    """Share no compiled program with other modules."""
    import jax

    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def leaks():
    """Return ``jax.jit`` for tests, with a check for leaked tracers.

    That switches JAX's caches off, so nothing else is done meanwhile.
    """
    import jax

    from .strict import checking_leaks

    def jitted(fn):
        def call(*args):
            with checking_leaks():
                jax.make_jaxpr(fn)(*args)
            return jax.jit(fn)(*args)

        return call

    return jitted


@pytest.fixture
def mesh():
    """Return a 2 x 4 mesh of CPU devices."""
    import jax

    auto = (jax.sharding.AxisType.Auto,) * 2
    devices = jax.devices("cpu")[:DEVICES]
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=auto, devices=devices)


@pytest.fixture(scope="session")
def built_once(tmp_path_factory, worker_id):
    """Return ``get(name, build)``: a folder that ``build(folder)`` filled, once for all workers."""
    root = tmp_path_factory.getbasetemp()
    if worker_id != "master":  # a worker's folder is in the run's
        root = root.parent

    def get(name, build):
        folder, done = root / name, root / f"{name}.done"
        with FileLock(root / f"{name}.lock"):
            if not done.exists():
                folder.mkdir()
                build(folder)
                done.touch()
        return folder

    return get
