"""Times several sides of one comparison in turn."""

import statistics
import time

import jax


def compare(benchmark, sides, make, *, rounds, unit, per=1, setup=lambda: None):
    """Times all sides in turn, round by round, so that they see the same machine.

    Args:
        benchmark: pytest-benchmark's fixture. It times whole rounds and keeps ``extra_info``.
        sides: by name, what ``make`` needs to know of a side. Ratios are those of the second
            to each of the others.
        make: called with one of them; returns what is timed. That may return a value that has
            ``block_until_ready``, or its own time in seconds.
        rounds: how many, after one that isn't counted.
        unit: of the times in the report: "µs" or "ms".
        per: calls that one run of it makes; times are per call.
        setup: runs before each, not timed.
    """
    runs = {side: make(how) for side, how in sides.items()}
    times = {side: [] for side in sides}

    def one_round():
        for side, run in runs.items():
            setup()
            start = time.perf_counter()
            result = run()
            getattr(result, "block_until_ready", lambda: None)()
            elapsed = time.perf_counter() - start
            times[side].append((result if isinstance(result, float) else elapsed) / per)

    benchmark.pedantic(one_round, rounds=rounds, warmup_rounds=1)
    counted = {side: values[1:] for side, values in times.items()}
    benchmark.extra_info["unit"] = unit
    benchmark.extra_info["seconds"] = {
        side: statistics.median(values) for side, values in counted.items()
    }
    _, ours, *_ = sides
    benchmark.extra_info["ratios"] = {
        f"{ours} / {other}": statistics.median(
            a / b for a, b in zip(counted[ours], counted[other], strict=True)
        )
        for other in sides
        if other != ours
    }


def in_turn(calls, rounds, clock=time.perf_counter, repeat=1):
    """Return the seconds of each round, by side, after one that isn't counted.

    Args:
        calls: by name, what is timed; each returns arrays.
        rounds: how many.
        clock: what tells the time; ``time.process_time`` for CPU seconds, on a shared machine.
        repeat: how often a side is called at its turn; the time is the median of these. A loop
            that repeats one step has the memory of the step before for its results, where sides
            that are called once each get pages that another side gave back.
    """

    def seconds(call):
        start = clock()
        jax.block_until_ready(call())
        return clock() - start

    times = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            times[name].append(statistics.median(seconds(call) for _ in range(repeat)))
    return {name: found[1:] for name, found in times.items()}


def compared(what, plain, ours, before):
    """Return a row of a table in Markdown: what is timed, medians of each side, and two ratios.

    Args:
        what: the first cells.
        plain: seconds of XLA in float32, by round, like the other two.
        ours: of ours.
        before: of the same without what is measured.
    """
    ms = [f"{statistics.median(one) * 1e3:.3g}" for one in (plain, ours, before)]
    ratios = [
        f"{statistics.median(a / b for a, b in zip(one, ours, strict=True)):.1f}"
        for one in (plain, before)
    ]
    return f"| {' | '.join(map(str, (*what, *ms, *ratios)))} |"
