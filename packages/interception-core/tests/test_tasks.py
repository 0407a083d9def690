"""The scope follows the task: it ends at every await and yield, and goes on after it."""

import asyncio
import inspect
import sys
import types

import jax
import pytest

from interception_core import Interceptor, PatchEngine, untapped

ENGINE = PatchEngine(disable_jit=True)


@pytest.fixture(autouse=True)
def program():
    module = types.ModuleType("program")
    exec("def value(): return 'plain'", module.__dict__)
    sys.modules["program"] = module
    yield module
    del sys.modules["program"]


def tapped(tag="tapped"):
    return Interceptor({"program.value": lambda call: tag})


def now():
    """What an operation gives here, and whether JIT is off here."""
    return sys.modules["program"].value(), bool(jax.config.jax_disable_jit)


ON, OFF = ("tapped", True), ("plain", False)


def test_coroutine():
    async def body(event):
        before = now()
        await event.wait()
        await asyncio.sleep(0)
        return before, now()

    async def main():
        event = asyncio.Event()
        task = asyncio.create_task(ENGINE.wrap(body, tapped())(event))
        await asyncio.sleep(0)
        meanwhile = now()
        event.set()
        return meanwhile, await task, now()

    assert inspect.iscoroutinefunction(ENGINE.wrap(body, tapped()))
    assert asyncio.run(main()) == (OFF, (ON, ON), OFF)


def test_interleaved_tasks_have_scopes_of_their_own():
    async def body():
        seen = set()
        for _ in range(5):
            seen.add(now()[0])
            await asyncio.sleep(0)
        return seen

    async def main():
        names = ["a", "b", "c"]
        tasks = [ENGINE.wrap(body, tapped(name))() for name in names]
        return await asyncio.gather(*tasks, body())

    assert asyncio.run(main()) == [{"a"}, {"b"}, {"c"}, {"plain"}]


def test_tasks_and_threads_started_inside_are_outside():
    async def child():
        return now()

    async def body():
        return now(), await asyncio.create_task(child()), await asyncio.to_thread(now), now()

    assert asyncio.run(ENGINE.wrap(body, tapped())()) == (ON, OFF, OFF, ON)


def test_awaited_coroutines_are_inside():
    async def child():
        await asyncio.sleep(0)
        return now()

    async def body():
        return await child()

    assert asyncio.run(ENGINE.wrap(body, tapped())()) == ON


def test_cancellation_reaches_the_body_in_its_scope():
    seen = []

    async def body():
        try:
            await asyncio.sleep(60)
        finally:
            seen.append(now())

    async def main():
        task = asyncio.create_task(ENGINE.wrap(body, tapped())())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return now()

    assert asyncio.run(main()) == OFF
    assert seen == [ON]


def test_exception_through_an_await():
    async def body():
        raise KeyError("lost")

    async def main():
        with pytest.raises(KeyError, match="lost"):
            await ENGINE.wrap(body, tapped())()
        return now()

    assert asyncio.run(main()) == OFF


def test_generator():
    def body():
        sent = yield now()
        while sent != "stop":
            try:
                sent = yield sent, now()
            except ValueError:
                sent = yield "caught", now()
        return "result", now()

    generator = ENGINE.wrap(body, tapped())()
    assert now() == OFF
    assert next(generator) == ON
    assert now() == OFF
    assert generator.send(1) == (1, ON)
    assert generator.throw(ValueError) == ("caught", ON)
    assert now() == OFF
    with pytest.raises(StopIteration) as stop:
        generator.send("stop")
    assert stop.value.value == ("result", ON)
    assert now() == OFF


def test_closing_a_generator_runs_its_cleanup_in_the_scope():
    seen = []

    def body():
        try:
            yield 1
        finally:
            seen.append(now())

    generator = ENGINE.wrap(body, tapped())()
    next(generator)
    generator.close()
    assert seen == [ON]
    assert now() == OFF


def test_generators_interleave():
    def body():
        for _ in range(3):
            yield now()[0]

    pairs = zip(ENGINE.wrap(body, tapped("a"))(), ENGINE.wrap(body, tapped("b"))(), strict=True)
    assert list(pairs) == [("a", "b")] * 3


def test_async_generator():
    async def body():
        try:
            sent = yield now()
            await asyncio.sleep(0)
            yield sent, now()
        finally:
            cleanup.append(now())

    async def main():
        generator = ENGINE.wrap(body, tapped())()
        first = await anext(generator)
        between = now()
        second = await generator.asend("sent")
        await generator.aclose()
        return first, between, second, now()

    cleanup = []
    assert asyncio.run(main()) == (ON, OFF, ("sent", ON), OFF)
    assert cleanup == [ON]


def test_async_generator_runs_to_its_end():
    async def body():
        for i in range(3):
            yield i, now()

    async def main():
        return [item async for item in ENGINE.wrap(body, tapped())()]

    assert asyncio.run(main()) == [(0, ON), (1, ON), (2, ON)]


def test_a_name_scope_goes_on_after_a_yield():
    paths = []

    def body():
        with jax.named_scope("layer"):
            sys.modules["program"].value()
            yield
            sys.modules["program"].value()
        sys.modules["program"].value()
        yield

    def handler(call):
        paths.append((call.module_path, call.op_id))

    generator = ENGINE.wrap(body, Interceptor({"program.value": handler}))()
    for _ in generator:
        with jax.named_scope("elsewhere"):
            pass
    assert paths == [("layer", "layer/value:0"), ("layer", "layer/value:1"), ("", "value:0")]


def test_inputs_are_known_until_suspended_code_ends():
    """And no longer."""
    x = jax.numpy.ones(2)
    calls, seen = [], []

    def handler(call):
        calls.append(call)
        seen.append(call.operand(x).provenance)

    def value():
        return sys.modules["program"].value()

    def generator(x):
        for _ in range(3):
            yield value()

    async def async_generator(x):
        for _ in range(3):
            yield value()

    async def coroutine(x):
        for _ in range(3):
            value()
            await asyncio.sleep(0)

    async def collect(fn):
        return [item async for item in fn(x)]

    interceptor = Interceptor({"program.value": handler})
    runs = [
        lambda: list(ENGINE.wrap(generator, interceptor)(x)),
        lambda: asyncio.run(collect(ENGINE.wrap(async_generator, interceptor))),
        lambda: asyncio.run(ENGINE.wrap(coroutine, interceptor)(x)),
    ]
    for run in runs:
        seen.clear()
        run()
        assert seen == ["args[0]"] * 3
        with pytest.raises(RuntimeError, match="must be read while the wrapped function runs"):
            calls[-1].operand(x)


def test_untapped_coroutines_and_generators():
    async def outside():
        await asyncio.sleep(0)
        return sys.modules["program"].value()

    def items():
        yield sys.modules["program"].value()

    async def body():
        inside = sys.modules["program"].value()
        return inside, await untapped(outside)(), list(untapped(items)())

    assert inspect.iscoroutinefunction(untapped(outside))
    assert asyncio.run(ENGINE.wrap(body, tapped())()) == ("tapped", "plain", ["plain"])
