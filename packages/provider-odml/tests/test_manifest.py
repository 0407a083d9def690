"""Statistics in files, and what says that they are of another program."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtap_testkit.odml_samples import MLP, MODELS, W8A8, W8A16, draw, mlp
from jaxtap_testkit.odml_statistics import PARAMS, X, stats_of_two, trained, two, without
from provider_odml import ManifestError, MovingAverage, OdmlError, OdmlRule, QuantStats, qat
from provider_odml.train.manifest import Manifest

pytestmark = pytest.mark.sample(2)


def manifest(fn, rules=(W8A8,), x=X):
    return Manifest.of(qat(fn, rules).plan(PARAMS, x))


@pytest.mark.slow
@pytest.mark.parametrize("average", [MovingAverage(), MovingAverage(0.9)])
@pytest.mark.parametrize("rule", [W8A8, W8A16], ids=str)
def test_what_is_saved_is_loaded(tmp_path, average, rule):
    stats = trained(rules=[rule], average=average)
    stats.save(tmp_path / "stats.json")
    loaded = QuantStats.load(tmp_path / "stats.json")
    assert list(loaded) == list(stats)
    assert loaded.manifest.diff(stats.manifest) is None
    np.testing.assert_array_equal(loaded.state, stats.state)
    assert [one.symmetric for one in loaded.values()] == [one.symmetric for one in stats.values()]
    assert {one.average for one in loaded.values()} == {average}
    assert [path.name for path in tmp_path.iterdir()] == ["stats.json"]


@pytest.mark.slow
def test_training_goes_on_from_a_file(tmp_path):
    model, stats = qat(mlp, W8A8), trained()
    stats.save(tmp_path / "stats.json")
    loaded = QuantStats.load(str(tmp_path / "stats.json"))
    step = jax.jit(lambda s: model(MLP, 2 * X, quant_stats=s))
    np.testing.assert_array_equal(step(loaded), step(stats))
    np.testing.assert_array_equal(loaded.state, stats.state)


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.float32(0.1), np.float32(1e-30), np.float32(3e38)])
def test_every_bit_of_a_range_is_kept(value):
    stats = trained(lambda w, x: x @ w, draw(6, 8), jnp.full((4, 6), value))
    again = QuantStats.from_json(stats.to_json())
    np.testing.assert_array_equal(again.state, stats.state)


@pytest.mark.slow
def test_a_file_is_replaced_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "stats.json"
    stats = trained()
    stats.save(path)
    before = path.read_bytes()

    def broken(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", broken)
    with pytest.raises(OSError, match="no space"):
        trained(rules=[W8A16]).save(path)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["stats.json"]


def broken_texts():
    text = trained().to_json()
    whole = json.loads(text)
    yield "empty", ""
    yield "cut off", text[: len(text) // 2]
    yield "a list", "[]"
    yield "a number", "3"
    yield "null", "null"
    yield "no manifest", json.dumps({"sites": whole["sites"]})
    yield "no sites", json.dumps({"manifest": whole["manifest"]})
    first = next(iter(whole["sites"]))
    for field, value in [
        ("upper", "a lot"),
        ("upper", None),
        ("lower", []),
        ("count", None),
        ("count", 1.5),
        ("count", -1),
        ("upper", float("nan")),
    ]:
        changed = json.loads(text)
        changed["sites"][first][field] = value
        yield f"{field} is {value}", json.dumps(changed)
    for value in ("slow", 2):
        yield f"decay is {value}", json.dumps({**whole, "decay": value})
    for field in ("qtype", "shape", "fingerprint"):
        changed = json.loads(text)
        del changed["manifest"]["sites"][first][field]
        yield f"a site without {field}", json.dumps(changed)
    other = json.loads(text)
    del other["sites"][first]
    yield "a site of the manifest alone", json.dumps(other)
    other = json.loads(text)
    del other["manifest"]["sites"][first]
    yield "a site of the statistics alone", json.dumps(other)


@pytest.fixture(scope="module")
def texts():
    return dict(broken_texts())


NAMES = [
    *("empty", "cut off", "a list", "a number", "null", "no manifest", "no sites"),
    *("upper is a lot", "upper is None", "lower is []", "count is None", "count is 1.5"),
    *("count is -1", "decay is slow", "decay is 2", "upper is nan"),
    *("a site without qtype", "a site without shape", "a site without fingerprint"),
    *("a site of the manifest alone", "a site of the statistics alone"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_file(tmp_path, texts, name):
    (tmp_path / "stats.json").write_text(texts[name])
    with pytest.raises(ManifestError, match=r"what QuantStats\.to_json writes"):
        QuantStats.load(tmp_path / "stats.json")


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "stats.json").write_bytes(b"\xff\xfe\x00TFL3")
    with pytest.raises(ManifestError):
        QuantStats.load(tmp_path / "stats.json")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        QuantStats.load(tmp_path / "stats.json")


# Differences.


def test_the_same_program_does_not_differ():
    assert manifest(two()).diff(manifest(two())) is None
    assert manifest(two()).diff(Manifest.from_json(manifest(two()).as_json())) is None


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_neither_does_it_for_another_batch(model):
    fn, params, x = MODELS[model]()
    q = qat(fn, W8A8)
    first, other = (Manifest.of(q.plan(params, batch)) for batch in (x, jnp.concatenate([x, x])))
    assert first.diff(other) is None


def test_a_renamed_layer():
    text = manifest(two()).diff(manifest(two(first="encoder")))
    assert "- enc/dot_general:0: int8[4, 8]" in text
    assert "+ encoder/dot_general:0: int8[4, 8]" in text
    assert "args[1]" not in text


def test_an_operation_more_that_shifts_the_counter():
    """All that has its old number and is another operation is named."""

    def fn(p, x, extra):
        h = x @ p["w"]
        if extra:
            h = jnp.sin(h) @ p["v"] @ p["v"].T
        return jnp.tanh(h) @ p["v"]

    without, more = (Manifest.of(qat(fn, W8A8).plan(PARAMS, X, extra)) for extra in (False, True))
    text = without.diff(more)
    assert "~ dot_general:1" in text
    assert "+ dot_general:2" in text
    assert "+ dot_general:3" in text
    assert "- " not in text


def test_an_operation_that_took_the_number_of_another_one_of_the_same_shape():
    def fn(p, x, swapped):
        h, g = jnp.tanh(x @ p["w"]), jnp.sin(x) @ p["w"]
        return (g + h if swapped else h + g) + jnp.abs(h)

    before, after = (Manifest.of(qat(fn, W8A8).plan(PARAMS, X, s)) for s in (False, True))
    assert "~ add:0" in str(before.diff(after))


def test_other_shapes():
    wide = {"w": draw(6, 16, seed=1), "v": draw(16, 3, seed=2)}
    now = Manifest.of(qat(two(), W8A8).plan(wide, X))
    text = manifest(two()).diff(now)
    assert "~ enc/dot_general:0" in text


def test_another_rule():
    text = manifest(two()).diff(manifest(two(), [W8A16]))
    assert "~ enc/dot_general:0: int8[4, 8] -> int16[4, 8]" in text
    rules = [OdmlRule(module_path="dec"), W8A8]
    assert "- dec/dot_general:0: int8[4, 3]" in str(manifest(two()).diff(manifest(two(), rules)))


def test_another_activation_function():
    text = manifest(two(act=jax.nn.gelu)).diff(manifest(two(act=jnp.abs)))
    assert "- enc/gelu:0" in text
    assert "+ enc/abs:0" in text


@pytest.mark.slow
@pytest.mark.parametrize("update", [False, True])
def test_a_missing_statistic_is_named(update):
    stats = without(stats_of_two(), "enc/dot_general:0")
    with pytest.raises(OdmlError, match=r"enc/dot_general:0.*init"):
        qat(two(), W8A8)(PARAMS, X, quant_stats=stats, update_quant_stats=update)


def test_a_state_of_other_sites():
    stats = stats_of_two()
    other = without(stats, "enc/dot_general:0")
    with pytest.raises(ManifestError, match="state"):
        stats.with_state(other.state)


def test_a_manifest_is_part_of_the_type():
    """A jitted function is traced again for statistics of another program."""
    same = qat(two(), W8A8)
    first, other = same.init(PARAMS, X), same.init(PARAMS, X)
    assert jax.tree.structure(first) == jax.tree.structure(other)
    different = qat(two(), W8A16).init(PARAMS, X)
    assert jax.tree.structure(first) != jax.tree.structure(different)
