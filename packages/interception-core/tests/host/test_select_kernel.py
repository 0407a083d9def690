import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import interception_core
from interception_core import (
    Aval,
    KernelCall,
    KernelSpec,
    PluginWarning,
    UnknownNameError,
    get_op,
    hookimpl,
    select_kernel,
)

X = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
W = jax.ShapeDtypeStruct((8, 2), jnp.int4)


def spec(target, **fields):
    fields = {"platform": "cpu", "op": "gemm", **fields}
    return KernelSpec(target, handlers="acme_kernels:handlers", **fields)


@pytest.fixture
def code(monkeypatch):
    """The module that the specs name, to be filled."""
    module = types.ModuleType("acme_kernels")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.fixture
def kernels(declare, host):
    """Makes a plugin with these kernels the only one."""

    def make(*specs, **hooks):
        return host(declare("acme", jaxtap_register_kernels=specs, **hooks))

    return make


class TestKernelCall:
    def seen(self, kernels, code, *args, **params):
        calls = []
        code.supports = lambda call: bool(calls.append(call)) or True
        kernels(spec("acme.gemm", supports="acme_kernels:supports"))
        select_kernel("gemm", "cpu", *args, **params)
        return calls[0]

    def test_describes_operands_and_parameters(self, kernels, code):
        call = self.seen(kernels, code, (X, np.zeros((), np.int8)), group=32, bias=True)
        operands = (Aval((4, 8), "bfloat16"), Aval((), "int8"))
        assert call == KernelCall("gemm", "cpu", operands, (("bias", True), ("group", 32)))
        assert call.param("group") == 32
        assert call.param("scale") is None
        assert call.param("scale", 1.0) == 1.0
        text = "gemm(bfloat16[4,8], int8[], bias=True, group=32) on cpu"
        assert str(call) == text

    def test_operands_are_anything_with_a_shape_and_a_dtype(self, kernels, code):
        operands = (jnp.ones(3), np.ones(3), W, Aval((2,), "float32"))
        call = self.seen(kernels, code, operands)
        assert [aval.dtype for aval in call.operands] == ["float32", "float64", "int4", "float32"]
        scalar_type = types.SimpleNamespace(shape=[3], dtype=np.float16)
        assert self.seen(kernels, code, [scalar_type]).operands == (Aval((3,), "float16"),)

    def test_tracers_are_operands_too(self, kernels, code):
        code.supports = lambda call: call.operands == (Aval((4, 8), "bfloat16"),)
        kernels(spec("acme.gemm", supports="acme_kernels:supports"))
        chosen = []
        jax.eval_shape(lambda x: chosen.append(select_kernel("gemm", "cpu", (x,))) or x, X)
        assert chosen[0].spec.target == "acme.gemm"

    def test_what_is_no_operand_is_refused(self, kernels):
        kernels()
        with pytest.raises(TypeError, match=r"gemm: operand 1 must have a shape and a dtype.*3\.5"):
            select_kernel("gemm", "cpu", (X, 3.5))

    def test_parameters_must_be_hashable(self, kernels):
        kernels()
        with pytest.raises(TypeError, match="gemm: the parameter 'axes' must be hashable"):
            select_kernel("gemm", "cpu", (X,), axes=[0])


class TestSelect:
    def test_the_last_answers_are_kept(self, kernels, code, monkeypatch):
        asked = []
        code.supports = lambda call: asked.append(call.param("group")) or call.param("group") > 2
        kernels(spec("acme.gemm", supports="acme_kernels:supports"))
        monkeypatch.setattr(sys.modules["interception_core.kernels.select"], "MOST", 3)
        for group in (1, 2, 3, 4, 5, 5, 4, 3, 1):
            chosen = select_kernel("gemm", "cpu", (X,), group=group)
            assert (chosen.spec is not None) == (group > 2)
        assert asked == [1, 2, 3, 4, 5, 1]

    def test_the_highest_priority_is_taken(self, kernels):
        low, high = spec("acme.low", priority=-1), spec("acme.high", priority=3)
        kernels(low, spec("acme.mid"), high)
        choice = select_kernel("gemm", "cpu", (X, W))
        assert choice == (high, "priority 3 of 3")

    def test_equal_priorities_have_an_order(self, kernels):
        kernels(spec("acme.b"), spec("acme.a"))
        assert select_kernel("gemm", "cpu").spec.target == "acme.a"

    def test_other_platforms_and_ops_are_not_asked(self, kernels):
        kernels(spec("acme.gpu", platform="cuda"), spec("acme.other", op="gemv"))
        assert select_kernel("gemm", "cpu") == (None, "no kernel for gemm on cpu")
        assert select_kernel("gemm", "cuda").spec.target == "acme.gpu"

    def test_a_kernel_that_does_not_support_the_call_is_passed_over(self, kernels, code):
        code.even = lambda call: call.operands[0].shape[0] % 2 == 0 or "M is odd"
        picky = spec("acme.picky", priority=9, supports="acme_kernels:even")
        plain = spec("acme.plain")
        kernels(picky, plain)
        assert select_kernel("gemm", "cpu", (X,)).spec == picky
        odd = jax.ShapeDtypeStruct((3, 8), jnp.float32)
        choice = select_kernel("gemm", "cpu", (odd,))
        assert choice == (plain, "priority 0 of 1; not acme.picky: M is odd")

    def test_reasons_where_none_supports_it(self, kernels, code):
        code.no = lambda call: False
        code.why = lambda call: "too small"
        kernels(
            spec("acme.a", supports="acme_kernels:no"), spec("acme.b", supports="acme_kernels:why")
        )
        reason = "acme.a: it does not support the call; acme.b: too small"
        assert select_kernel("gemm", "cpu") == (None, reason)

    @pytest.mark.parametrize(
        ("supports", "message"),
        [
            (lambda call: 1 / 0, "ZeroDivisionError: division by zero"),
            (lambda call: sys.exit("enough"), "SystemExit: enough"),
            (lambda call: None, "must return a bool or a str that tells why not, got None"),
            (lambda: True, "TypeError"),
            (None, "must be callable"),
        ],
    )
    def test_a_broken_predicate_is_warned_about_once(self, kernels, code, supports, message):
        code.broken = supports
        kernels(spec("acme.broken", priority=9, supports="acme_kernels:broken"), spec("acme.plain"))
        with pytest.warns(PluginWarning, match=message) as caught:
            choice = select_kernel("gemm", "cpu", (X,))
        assert "plugin 'acme' (acme-dist 1.0)" in str(caught[0].message)
        assert caught[0].filename == __file__
        assert choice.spec.target == "acme.plain"
        assert message in choice.reason
        assert select_kernel("gemm", "cpu", (X,)) == choice

    def test_a_warning_that_is_an_error_does_not_spoil_the_answer(self, kernels, code):
        code.broken = lambda call: 1 / 0
        kernels(spec("acme.broken", supports="acme_kernels:broken"), spec("acme.plain"))
        with pytest.raises(PluginWarning):
            select_kernel("gemm", "cpu")
        assert select_kernel("gemm", "cpu").spec.target == "acme.plain"

    def test_each_different_call_is_asked_about_once(self, kernels, code):
        asked = []
        code.supports = lambda call: bool(asked.append(call)) or True
        kernels(spec("acme.gemm", supports="acme_kernels:supports"))
        for _ in range(3):
            select_kernel("gemm", "cpu", (X, W), group=32)
            select_kernel("gemm", "cpu", (np.ones((4, 8), jnp.bfloat16), W), group=32)
        assert len(asked) == 1
        select_kernel("gemm", "cpu", (X, W), group=64)
        select_kernel("gemm", "cpu", (X,), group=64)
        assert len(asked) == 3

    def test_contested_kernels_are_not_used(self, declare, host):
        both = [spec("acme.gemm", priority=9)]
        own = spec("acme.own")
        host(
            declare("acme", jaxtap_register_kernels=[*both, own]),
            declare("rival", jaxtap_register_kernels=both),
        )
        with pytest.warns(PluginWarning, match="got 'acme.gemm@cpu', which is claimed by"):
            assert select_kernel("gemm", "cpu").spec == own


class TestHook:
    def test_picks_by_target_or_spec(self, kernels):
        for pick in ("acme.a", spec("acme.a")):
            kernels(
                spec("acme.a"),
                spec("acme.b", priority=9),
                jaxtap_select_kernel=lambda call, candidates, pick=pick: pick,
            )
            choice = select_kernel("gemm", "cpu")
            assert choice == (spec("acme.a"), "picked by plugin 'acme' (acme-dist 1.0)")

    def test_gets_the_call_and_the_kernels_that_support_it(self, kernels, code):
        seen = []
        code.no = lambda call: False
        kernels(
            spec("acme.a"),
            spec("acme.b", priority=9),
            spec("acme.c", supports="acme_kernels:no"),
            jaxtap_select_kernel=lambda call, candidates: seen.append((call, candidates)),
        )
        assert select_kernel("gemm", "cpu", (X,)).spec.target == "acme.b"
        ((call, candidates),) = seen
        assert call == KernelCall("gemm", "cpu", (Aval((4, 8), "bfloat16"),))
        assert [candidate.target for candidate in candidates] == ["acme.b", "acme.a"]
        select_kernel("gemm", "cpu", (X,))
        assert len(seen) == 1

    def test_is_not_asked_where_there_is_nothing_to_choose(self, kernels):
        kernels(jaxtap_select_kernel=lambda call, candidates: 1 / 0)
        assert select_kernel("gemm", "cpu").spec is None

    def test_the_first_plugin_with_an_opinion_decides(self, declare, host):
        def plugin(name, answer):
            return declare(
                name,
                jaxtap_register_kernels=[spec(f"{name}.gemm")],
                jaxtap_select_kernel=lambda call, candidates: answer,
            )

        host(plugin("a", None), plugin("b", "c.gemm"), plugin("c", "a.gemm"))
        choice = select_kernel("gemm", "cpu")
        assert choice == (spec("c.gemm"), "picked by plugin 'b' (b-dist 1.0)")

    def test_plugins_are_asked_by_name_whatever_their_options(self, declare, host):
        last = declare("z", jaxtap_register_kernels=[spec("acme.a"), spec("acme.z")])
        hook = hookimpl(tryfirst=True)(lambda call, candidates: "acme.z")
        sys.modules[last.module].jaxtap_select_kernel = hook
        host(declare("a", jaxtap_select_kernel=lambda call, candidates: "acme.a"), last)
        assert select_kernel("gemm", "cpu").spec.target == "acme.a"

    def test_takes_the_arguments_that_it_names(self, kernels):
        kernels(
            spec("acme.a"),
            spec("acme.b"),
            jaxtap_select_kernel=lambda candidates, other=None: candidates[-1],
        )
        assert select_kernel("gemm", "cpu").spec.target == "acme.b"

    @pytest.mark.parametrize(
        ("hook", "message"),
        [
            (lambda call, candidates: 1 / 0, "ZeroDivisionError"),
            (lambda call, candidates: sys.exit("enough"), "SystemExit"),
            (lambda call, candidates: "acme.c", "got 'acme.c'. Return one of acme.*, or None"),
            (lambda call, candidates: 3, "target, got 3"),
            (lambda call, candidates: spec("acme.a", priority=5), "target, got KernelSpec"),
        ],
    )
    def test_a_broken_hook_is_warned_about_and_passed_over(self, declare, host, hook, message):
        kernels = [spec("acme.a"), spec("acme.b", priority=9)]
        host(
            declare("acme", jaxtap_register_kernels=kernels, jaxtap_select_kernel=hook),
            declare("other", jaxtap_select_kernel=lambda call, candidates: "acme.a"),
        )
        with pytest.warns(PluginWarning, match=f"plugin 'acme' .*{message}"):
            choice = select_kernel("gemm", "cpu")
        assert choice == (kernels[0], "picked by plugin 'other' (other-dist 1.0)")


class TestGetOp:
    def test_is_the_apply_of_the_highest_priority(self, kernels, code):
        code.low, code.high = (lambda: "low"), (lambda: "high")
        kernels(
            spec("acme.low", apply="acme_kernels:low"),
            spec("acme.high", apply="acme_kernels:high", priority=1, platform="cuda"),
            spec("acme.bare", priority=9),
        )
        assert get_op("gemm")() == "high"

    def test_an_unknown_op(self, kernels):
        kernels(spec("acme.gemm", apply="acme_kernels:low"))
        with pytest.raises(UnknownNameError, match="Did you mean 'gemm'") as caught:
            get_op("gem")
        assert caught.value.known == ("gemm",)

    def test_an_op_without_a_function(self, kernels):
        kernels(spec("acme.bare"))
        with pytest.raises(UnknownNameError, match=r"acme.bare implements it, without an apply"):
            get_op("gemm")

    def test_a_function_that_cannot_be_loaded(self, kernels, code):
        kernels(spec("acme.gemm", apply="acme_kernels:nothing"))
        with pytest.raises(
            interception_core.PluginError, match=r"Kernel 'acme.gemm@cpu' of plugin"
        ):
            get_op("gemm")
