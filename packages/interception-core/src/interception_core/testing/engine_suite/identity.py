"""Identity: ids, paths and fingerprints are stable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import Interceptor, OpCall, PatchEngine
from ..models import Model, models
from . import targets
from .base import Suite, abstractly, arrays, let, noting, times
from .handlers import STEP, eager_and_jitted


def _scalar(fn: Callable) -> Callable:
    return lambda *args: jnp.sum(fn(*args))


IDENTITY_UNDER: dict[str, Callable[[Callable], Callable]] = {
    "eager": lambda fn: fn,
    "jit": jax.jit,
    "grad": lambda fn: jax.grad(_scalar(fn)),
    "jit of grad": lambda fn: jax.jit(jax.grad(_scalar(fn))),
    "vmap": lambda fn: jax.vmap(fn, in_axes=None, axis_size=2),
    "checkpoint": jax.checkpoint,
    "eval_shape": abstractly,
    "make_jaxpr": jax.make_jaxpr,
}


def on_arrays(model: Model) -> tuple:
    """Return the model's arguments as JAX's arrays."""
    return jax.tree.map(jnp.asarray, model.make_args())


def jitted_model(params: Any, x: Any) -> Any:
    """Jitted blocks: used twice, nested, and under a scope."""

    @jax.jit
    def block(x: Any, w: Any) -> Any:
        with jax.named_scope("inside"):
            return jnp.dot(x, w)

    @jax.jit
    def around(x: Any) -> Any:
        x = jnp.dot(x, params["a"])
        return block(x, params["b"])

    with jax.named_scope("first"):
        x = block(x, params["a"])
    with jax.named_scope("second"):
        x = around(jnp.dot(x, params["a"]))
    return jnp.dot(x, params["b"])


LABELLED = [
    "first/inside/jit(block)/dot:0",
    "second/dot:0",
    "second/jit(around)/dot:0",
    "second/inside/jit(block)/dot:0",
    "dot:0",
]
LOOKED_THROUGH = ["first/inside/dot:0", "second/dot:0", "second/dot:1", "second/inside/dot:0"]
LOOKED_THROUGH.append("dot:0")


class IdentitySuite(Suite):
    """The names by which handlers and rules know an operation."""

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Leave models with loops to the engines that don't unroll them."""
        if "model" in metafunc.fixturenames:
            shared = [m for m in models() if not (m.staged and metafunc.cls.disables_jit)]
            names = metafunc.fixturenames
            cases = [
                (model, name) if "under" in names else (model,)
                for model in shared
                for name in (IDENTITY_UNDER if "under" in names else ["eager"])
                if model.differentiable or "grad" not in name
            ]
            arguments = ("model", "under") if "under" in names else ("model",)
            ids = ["-".join(map(str, case)).replace(" ", "_") for case in cases]
            metafunc.parametrize(arguments, cases, ids=ids)

    def test_ids_of_the_shared_models(self, model: Model, under: str) -> None:
        seen = self.first_calls(model.fn, on_arrays(model), model.targets, IDENTITY_UNDER[under])
        # Branches may be shown in either order.
        assert sorted(seen) == sorted(model.ids)

    def test_ids_are_those_of_the_patch_engine(self, model: Model) -> None:
        """Names, paths, levels and fingerprints too."""

        def look(call: OpCall) -> tuple:
            return call.op_id, call.op_name, call.module_path, call.level, call.fingerprint

        reference = PatchEngine(disable_jit=self.disables_jit)
        case = model.fn, on_arrays(model), model.targets, abstractly, look
        assert sorted(self.first_calls(*case)) == sorted(self.first_calls(*case, engine=reference))

    def test_ids_do_not_depend_on_what_ran_before(self, model: Model) -> None:
        args = on_arrays(model)

        def look(call: OpCall) -> tuple:
            return call.op_id, call.fingerprint

        def run(transform: Callable = abstractly) -> list:
            return self.first_calls(model.fn, args, model.targets, transform, look)

        first = run()
        model.fn(*args)
        assert run() == first
        jax.jit(model.fn)(*args)
        assert run(jax.jit) == run() == first
        self.engine.wrap(model.fn, Interceptor({model.targets[0]: times(2)}))(*args)
        assert run() == first

    def test_a_result_is_the_same_where_all_is_let_run(self, model: Model) -> None:
        args = on_arrays(model)
        plain = jax.jit(self.plain(model.fn))(*args)
        tapped = jax.jit(self.wrap(model.fn, dict.fromkeys(model.targets, let)))(*args)
        np.testing.assert_array_equal(tapped, plain)

    @eager_and_jitted
    def test_ids_in_jitted_functions(self, outer: Callable) -> None:
        w, x = arrays((4, 4), (2, 4))
        params = {"a": w, "b": w + 1}
        labels = self.labels_jit and not self.disables_jit
        seen = self.first_calls(jitted_model, (params, x), ("jax.numpy.dot",), outer)
        assert seen == (LABELLED if labels else LOOKED_THROUGH)
        reference = PatchEngine(disable_jit=not labels)
        assert seen == self.first_calls(
            jitted_model, (params, x), ("jax.numpy.dot",), outer, engine=reference
        )

    def test_ids_around_a_jitted_function_do_not_depend_on_its_cache(self) -> None:
        block = jax.jit(lambda x, w: targets.step(x, w))

        def body(x: Any, w: Any) -> Any:
            x = targets.step(block(x, w), w)
            return targets.step(block(x, w), w)

        args = arrays((2, 3), (3, 3))
        first = self.first_calls(body, args, (STEP,))
        block(*args)
        assert self.first_calls(body, args, (STEP,)) == first
        assert self.first_calls(body, args, (STEP,), jax.jit) == first

    def test_paths_start_at_the_wrapped_function(self) -> None:
        def body(x: Any, w: Any) -> Any:
            with jax.named_scope("inside"):
                return targets.step(x, w)

        with jax.named_scope("outside"):
            assert self.first_calls(body, arrays((2, 3), (3, 3)), (STEP,)) == ["inside/step:0"]

    def test_each_scope_has_paths_and_numbers_of_its_own(self) -> None:
        seen: dict[str, list] = {"inner": [], "outer": []}
        notes = {name: noting(log, lambda call: call.op_id) for name, log in seen.items()}
        inner = self.wrap(lambda x, w: targets.step(x, w), {STEP: notes["inner"]})

        def body(x: Any, w: Any) -> Any:
            x = targets.step(x, w)
            with jax.named_scope("block"):
                return inner(targets.step(x, w), w)

        self.wrap(body, {STEP: notes["outer"]})(*arrays((2, 3), (3, 3)))
        assert list(dict.fromkeys(seen["inner"])) == ["step:0"]
        assert list(dict.fromkeys(seen["outer"])) == ["step:0", "block/step:0", "block/step:1"]

    def test_numbers_count_by_path_and_name(self) -> None:
        def body(x: Any, w: Any) -> Any:
            for name in ("a", "b", "a"):
                with jax.named_scope(name):
                    x = targets.layer.shifted(targets.step(x, w))
            return targets.step(x, w)

        shifted = f"{targets.__name__}.Layer.shifted"
        seen = self.first_calls(body, arrays((2, 3), (3, 3)), (STEP, shifted))
        assert sorted(seen) == [
            "a/Layer.shifted:0",
            "a/Layer.shifted:1",
            "a/step:0",
            "a/step:1",
            "b/Layer.shifted:0",
            "b/step:0",
            "step:0",
        ]

    @eager_and_jitted
    def test_fingerprints_tell_structures_apart(self, outer: Callable) -> None:
        def body(x: Any, w: Any) -> None:
            targets.affine(x, w)
            targets.affine(x + 1, w)
            targets.affine(x[:1], w)
            targets.affine(x, w, scale=2)
            targets.affine(x, w, mode="relu")
            targets.affine(x, w=w)
            targets.affine(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))

        def look(call: OpCall) -> tuple:
            return call.op_id, call.fingerprint

        args = arrays((2, 3), (3, 3))
        calls = self.first_calls(body, args, (f"{targets.__name__}.affine",), outer, look)
        prints = [fingerprint for _, fingerprint in calls]
        assert len(prints) == 7
        assert prints[0] == prints[1]
        assert len(set(prints)) == 6
