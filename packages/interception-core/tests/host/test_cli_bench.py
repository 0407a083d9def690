import json
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from interception_core import (
    Bench,
    BenchCase,
    JaxtapError,
    KernelSpec,
    PluginError,
    PluginRecord,
    read_table,
    select_kernel,
    slower_than,
)
from interception_core.cli import main
from interception_core.kernels.bench import write_table
from interception_core.kernels.select import chosen_kernel

OWN = PluginRecord("interception-core", "interception_core._plugin", "interception-core", "0.1.0")
X = jnp.ones((4, 64, 64))


def spec(target, **fields):
    return KernelSpec(target, "cpu", "acme_bench:none", "gemm", **fields)


def times(count):
    """Return a function that multiplies so often."""
    return lambda x: lax.fori_loop(0, count, lambda _, y: y @ x[1] / 64, x[0])


class Gemm:
    """An op as packages have them, jitted, without FFI: which kernel it gets decides its work."""

    def __init__(self):
        self.chosen = []
        self.work = {"acme.gemm": 1, "rival.gemm": 300, None: 2000}

        @jax.jit
        def call(x):
            kernel = select_kernel("gemm", "cpu", (x,)).spec
            target = None if kernel is None else kernel.target
            self.chosen.append(target)
            return times(self.work[target])(x)

        self.call = call


@pytest.fixture
def bench(declare, host, monkeypatch, tmp_path):
    """A plugin with two kernels of an op, of which the first declares what to time."""
    module = types.ModuleType("acme_bench")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    gemm = Gemm()

    def case():
        return BenchCase(
            {"dtype": "float32", "rows": 64},
            lambda: (gemm.call, (X,)),
            {"float": lambda: (times(500), (X,))},
        )

    module.cases = lambda spec: Bench([case()], "float", tmp_path / "t.json", "v1")
    module.wrong = lambda spec: 7
    module.tableless = lambda spec: Bench([case()])
    module.refused = lambda call: "XLA is faster"
    module.gemm = gemm
    ours = spec("acme.gemm", bench="acme_bench:cases", priority=1, supports="acme_bench:refused")
    host(
        OWN,
        declare("acme", api=(1, 5), jaxtap_register_kernels=[ours]),
        declare("rival", jaxtap_register_kernels=[spec("rival.gemm")]),
    )
    return module


class TestBench:
    @pytest.mark.slow
    def test_each_side_gets_its_kernel(self, bench, capsys):
        assert main(["bench", "acme.gemm", "--seconds", "0", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert bench.gemm.chosen == ["acme.gemm", "rival.gemm", None]
        assert (found["kernel"], found["variant"]) == ("acme.gemm", "v1")
        (case,) = found["cases"]
        assert case["labels"] == {"dtype": "float32", "rows": 64}
        assert list(case["seconds"]) == ["kernel", "rival.gemm", "reference", "float"]
        assert case["seconds"]["kernel"] < min(
            case["seconds"][side] for side in ("rival.gemm", "reference", "float")
        )

    @pytest.mark.slow
    def test_a_kernel_may_displace_nothing_of_higher_priority(self, bench, capsys):
        given = ["bench", "rival.gemm", "--cases", "acme_bench:cases", "--seconds", "0"]
        assert main(given) == 0
        out = capsys.readouterr().out
        assert "acme.gemm ms" in out.splitlines()[0]
        assert bench.gemm.chosen == ["rival.gemm", "acme.gemm", None]

    def test_leaves_sides_out(self, bench, capsys):
        given = ["bench", "gemm", "--skip", "reference", "--skip", "rival.gemm", "--json"]
        assert main([*given, "--seconds", "0"]) == 0
        (case,) = json.loads(capsys.readouterr().out)["cases"]
        assert list(case["seconds"]) == ["kernel", "float"]
        assert bench.gemm.chosen == ["acme.gemm"]

    @pytest.mark.slow
    def test_an_op_stands_for_its_first_kernel(self, bench, capsys):
        assert main(["bench", "gemm", "--seconds", "0"]) == 0
        head, line = capsys.readouterr().out.splitlines()
        assert head.split()[:4] == ["dtype", "rows", "kernel", "ms"]
        assert not line.endswith("slower")

    def test_writes_the_table(self, bench, capsys, tmp_path):
        write_table(tmp_path / "t.json", "acme.gemm", "v0", [{"rows": 1, "ratio": 3.0}])
        for _ in range(2):
            assert main(["bench", "acme.gemm", "--seconds", "0", "--write"]) == 0
        table = read_table(tmp_path / "t.json")["acme.gemm"]
        assert table["v0"] == [{"rows": 1, "ratio": 3.0}]
        (row,) = table["v1"]
        assert row["rows"] == 64
        assert 0 < row["ratio"] < 1

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["acme.gem"], "got 'acme.gem'. Did you mean 'acme.gemm'?"),
            (["rival.gemm"], "must declare cases to be timed, got rival.gemm"),
            (["acme.gemm", "--only", "rows=3"], "no case of acme.gemm has these labels"),
            (["acme.gemm", "--skip", "float"], "--skip must leave the sides kernel and float"),
            (["acme.gemm", "--only", "rows"], "--only must be LABEL=VALUE, got 'rows'"),
            (["acme.gemm", "--cases", "acme_bench:wrong"], "must return a Bench, got 7"),
            (
                ["acme.gemm", "--cases", "acme_bench:tableless", "--write"],
                "must have a table for --write, got acme.gemm",
            ),
        ],
    )
    def test_what_is_wrong(self, bench, capsys, arguments, message):
        assert main(["bench", *arguments]) == 1
        assert message in capsys.readouterr().err


def test_the_choice_of_a_kernel_is_for_the_block_alone(bench):
    ours = spec("acme.gemm")
    with chosen_kernel("gemm", "cpu", ours):
        assert select_kernel("gemm", "cpu").spec == ours
        with chosen_kernel("gemm", "cpu", None):
            assert select_kernel("gemm", "cpu").spec is None
        assert select_kernel("other", "cpu").spec is None
    assert select_kernel("gemm", "cpu").spec.target == "rival.gemm"


def test_a_bench_must_be_a_path():
    with pytest.raises(PluginError, match=r"KernelSpec\.bench must be"):
        spec("acme.gemm", bench="not a path")


def test_a_damaged_table(tmp_path):
    (tmp_path / "t.json").write_text("{")
    with pytest.raises(JaxtapError, match="must be JSON"):
        read_table(tmp_path / "t.json")


class TestSlowerThan:
    ROWS = (1, 4, 16, 64)

    def cases(self, ratios, **labels):
        return [
            {"dtype": "f32", "n": 1024, **labels, "rows": rows, "ratio": ratio}
            for rows, ratio in zip(self.ROWS, ratios, strict=True)
        ]

    def asked(self, cases, rows, dtype="f32", n=1024):
        return slower_than(cases, "rows", rows, same={"dtype": dtype}, near={"n": n})

    def test_says_where(self):
        cases = self.cases([0.5, 1.2, 1.3, 0.9])
        assert self.asked(cases, 3) is None
        assert self.asked(cases, 4) == "with 4 to 63 rows (measured with n=1024)"
        assert self.asked(cases, 63) == "with 4 to 63 rows (measured with n=1024)"
        assert self.asked(cases, 64) is None
        assert "from 64 rows on" in self.asked(self.cases([0.5, 0.5, 0.5, 2.0]), 10**6)
        assert "from 1 rows on" in self.asked(self.cases([2.0] * 4), 2)

    def test_noise_does_not_count(self):
        assert self.asked(self.cases([1.04] * 4), 1) is None

    def test_takes_the_nearest_size_and_the_same_labels(self):
        cases = self.cases([0.5] * 4) + self.cases([2.0] * 4, n=8192)
        assert self.asked(cases, 1, n=2048) is None
        assert self.asked(cases, 1, n=6000) is not None
        assert self.asked(cases, 1, n=6000, dtype="bf16") is None
        assert self.asked([], 1) is None

    @given(st.lists(st.sampled_from([0.5, 1.5]), min_size=4, max_size=4), st.integers(0, 100))
    def test_each_row_has_the_answer_of_the_case_before_it(self, ratios, rows):
        before = [r for i, r in enumerate(ratios) if i == 0 or self.ROWS[i] <= rows]
        assert (self.asked(self.cases(ratios), rows) is None) == (before[-1] < 1)
