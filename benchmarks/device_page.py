"""What runs in LiteRT, beside float and JAX: writes the tables of docs/benchmarks/odml.md.

    uv run --python 3.12 --group bench --group peers --group efficientnet \
        python benchmarks/device_page.py --page docs/benchmarks/odml.md

In twelve minutes on two idle cores. Without --page it prints the tables. Names of steps
(coverage, cnns, llm, steps) run these alone.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import device_coverage
import device_networks
import jax
import numpy as np

import provider_odml as odml
from provider_odml_export.litert import Runner

ROOT = Path(__file__).parent.parent
FLOAT = "float"
RULES = {
    FLOAT: {},
    "int8, static": {"weight_qtype": "int8", "output_qtype": "int8"},
    "int8, dynamic": {"weight_qtype": "int8", "input_qtype": "int8"},
    "int4 weights": {"weight_qtype": "int4"},
}


def photographs():
    """Return photographs, and other images to calibrate with, ``[n, side, side, 3]``."""
    from examples.efficientnet import photographs

    return photographs.read(places=photographs.PLACES), photographs.calibrating()


def networks():
    """Yield networks: name, function, parameters, images, images to calibrate with."""
    from examples.efficientnet import load, model

    images, calibrating = photographs()
    yield "EfficientNet-Lite0", model.classify, load.read_params(), images, calibrating
    step = images.shape[1] // device_networks.SIDE
    side = step * device_networks.SIDE
    # Of drawn parameters, the middles of the photographs tell enough.
    images = images[:: len(images) // 8, :side:step, :side:step]
    calibrating = calibrating[:, :side:step, :side:step]
    for name in device_networks.NETWORKS:
        yield name, *device_networks.drawn(name, images[:1]), images, calibrating


def exported(fn, params, images, calibrating, mode):
    """Return the artifact of a mode, for one image."""
    rules = [odml.OdmlRule(**RULES[mode])]
    model, stats = odml.qat(fn, rules, strict=False), None
    if rules[0].is_static:
        stats = model.calibrate(params, [(calibrating[i : i + 4],) for i in (0, 4, 8)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", odml.OdmlWarning)  # drawn parameters make odd ranges
        return model.export(params, stats, images[:1])


def cnns(rounds=15):
    """Yield the table of CNNs: files, likeness to float on photographs, latency with XNNPACK."""
    head = ["network", "file", "MB", "operations in float", "same class", "cosine, least", "ms"]
    head += ["times float"]
    yield from ("| " + " | ".join(head) + " |", "| --- " * len(head) + "|")
    for name, fn, params, images, calibrating in networks():
        exact = np.concatenate([jax.jit(fn)(params, images[i : i + 1]) for i in range(len(images))])
        exact = exact.reshape(len(images), -1)
        runs, rows = {}, {}
        for mode in RULES:
            try:
                made = exported(fn, params, images, calibrating, mode)
            except odml.OdmlError as error:
                rows[mode] = ["refused: " + str(error).splitlines()[0][:80]]
                continue
            runner = Runner(made.model, threads=2)
            (key,) = made.report.signatures[0].inputs
            runs[mode] = lambda x, runner=runner, key=key: next(
                iter(runner.run("serving_default", **{key: x}).values())
            )
            count = f"{made.report.float_ops} of {sum(made.report.ops.values())}"
            rows[mode] = [f"{len(made.model) / 1e6:.1f}", count]
        seconds = {mode: [] for mode in runs}
        for _ in range(rounds):
            for mode, run in runs.items():
                run(images[:1])  # wakes the threads
                start = time.perf_counter()
                run(images[:1])
                seconds[mode].append(time.perf_counter() - start)
        for mode, cells in rows.items():
            if mode in runs:
                found = np.concatenate([runs[mode](one[None]) for one in images])
                cells = [*cells, *_likeness(found.reshape(exact.shape), exact)]
                ours = statistics.median(seconds[mode])
                pairs = zip(seconds[FLOAT], seconds[mode], strict=True)
                ratio = statistics.median(a / b for a, b in pairs)
                cells += [f"{ours * 1e3:.2f}", f"{ratio:.2f}"]
            yield "| " + " | ".join([name, mode, *cells]) + " |"


def _likeness(found, exact):
    """Return in how many rows the greatest number is the same, and the least cosine."""
    norms = np.linalg.norm(found, axis=-1) * np.linalg.norm(exact, axis=-1)
    same = (found.argmax(-1) == exact.argmax(-1)).sum()
    return f"{same} of {len(exact)}", f"{((found * exact).sum(-1) / norms).min():.3f}"


LLM = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 8,
       "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1536,
       "vocab_size": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e6}  # fmt: skip
PROMPT, POSITIONS = 64, 256
TEXT = "x" * (PROMPT + 1)
RUN = """
import json, sys, litert_lm
backend = litert_lm.Backend.CPU(thread_count=2)
with litert_lm.Engine(sys.argv[1], backend=backend, enable_benchmark=True) as engine:
    greedy = litert_lm.SamplerConfig(top_k=1, top_p=1.0, temperature=1.0)
    with engine.create_session(apply_prompt_template=False, sampler_config=greedy) as session:
        session.run_prefill([sys.argv[2]])
        session.run_decode()
        found = session.get_benchmark_info()
    speeds = found.last_prefill_tokens_per_second, found.last_decode_tokens_per_second
    print("FOUND", json.dumps(speeds))
"""
"""A separate process: LiteRT-LM and ai-edge-litert hold two builds of one library."""


def llm():
    """Yield the table of a decoder: LiteRT-LM beside our programs on the CPU, tokens per second."""
    from jaxtap_llm import checkpoint, device
    from jaxtap_llm.bundle import Bundle
    from jaxtap_llm.fields import parse_config

    config = parse_config(LLM)
    params = checkpoint.init(config)
    # The byte 255 ends a text, and no text gets there: both run as far as there are positions.
    params["head"] = params["head"] * (np.arange(256) < 255)
    ours = {"float": None, "dynamic": "w8a8", "weights": "int8", "int4": "int4"}
    yield "| `--preset` | MB | prefill, LiteRT-LM | ours | decode, LiteRT-LM | ours |"
    yield "| --- " * 6 + "|"
    for name, preset in ours.items():
        made = device.export(config, params, name, PROMPT, POSITIONS)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text('{"eos_token_id": 255}')
            path = Path(folder) / "model.litertlm"
            Bundle(folder, POSITIONS).write(path, made.model)
            command = [sys.executable, "-c", RUN, str(path), TEXT]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            theirs = []
            for _ in range(3):
                out = subprocess.run(command, check=True, **pipes).stdout
                theirs.append(json.loads(out.decode().partition("FOUND ")[2]))
        prefill, decode = (statistics.median(one) for one in zip(*theirs, strict=True))
        own = list(_ours(config, params, preset))
        cells = [f"`{name}`", f"{len(made.model) / 1e6:.1f}", f"{prefill:.0f}", f"{own[0]:.0f}"]
        yield "| " + " | ".join([*cells, f"{decode:.0f}", f"{own[1]:.0f}"]) + " |"


def _ours(config, params, preset):
    """Yield our tokens per second of a prompt, and of one token after the other."""
    from jaxtap_llm.bench import Timed
    from jaxtap_llm.generate import Generator
    from jaxtap_llm.quantized import whole_plan
    from jaxtap_llm.rules import rules_for

    if preset is None:
        generator = Generator(config, params)
    else:
        plan = whole_plan(config, rules_for(config, preset), "float32")
        generator = Generator(config, plan.quantize(params), plan)
    timed = Timed(generator)
    yield PROMPT / statistics.median([timed.prefill(PROMPT) for _ in range(6)][1:])
    yield 1 / statistics.median([timed.decode(POSITIONS - 17, 16) for _ in range(6)][1:])


def steps(page):
    """Measure the train step, and write its tables below the mark of ``tools/bench_report``."""
    with tempfile.TemporaryDirectory() as folder:
        found = str(Path(folder) / "bench.json")
        run = [sys.executable, "-m", "pytest", "-n", "0", "-q", "benchmarks/test_odml.py"]
        subprocess.run([*run, "--benchmark-json", found], check=True, cwd=ROOT)
        report = [sys.executable, "tools/bench_report", found]
        subprocess.run([*report, str(page or Path(folder) / "page.md")], check=True, cwd=ROOT)
        if page is None:
            print((Path(folder) / "page.md").read_text())


TABLES = {"coverage": device_coverage.rows, "cnns": cnns, "llm": llm}


def put(page, name, lines):
    """Put lines between the marks of a table."""
    begin, end, text = f"<!-- {name} -->\n", f"<!-- end of {name} -->", page.read_text()
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    page.write_text(head + begin + "\n" + "\n".join(lines) + "\n\n" + end + tail)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", nargs="*", help="coverage, cnns, llm, steps; default all")
    parser.add_argument("--page", type=Path, help="the document to write the tables to")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    for name, make in TABLES.items():
        if args.steps and name not in args.steps:
            continue
        lines, start = [], time.perf_counter()
        for line in make():
            print(line, flush=True)
            lines.append(line)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
        if args.page:
            put(args.page, name, lines)
    if not args.steps or "steps" in args.steps:
        steps(args.page and args.page.resolve())


if __name__ == "__main__":
    main()
