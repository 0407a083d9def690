"""``jaxtap llm``: quantize language models (Llama, Mistral, Phi, Qwen, Gemma, gpt-oss), and more.

Importing this module does not import jax: ``jaxtap llm --help`` answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from pathlib import Path

from .config import LlmError
from .rules import CACHES, DEVICE, DTYPES, FORMATS

_EXAMPLES = """examples:
jaxtap llm demo
jaxtap llm quantize FOLDER OUT --preset int4
jaxtap llm quantize FOLDER OUT --bits 3.5 --calibrate book.txt
jaxtap llm generate OUT --prompt "Once upon a time"
jaxtap llm generate Qwen2.5-0.5B-Instruct-GPTQ-Int4 --prompt "Hello"
jaxtap llm generate Phi-4-mini-instruct-Q4_K_M.gguf --prompt "Hello"
jaxtap llm export OUT PROGRAMS
jaxtap llm device FOLDER model.tflite --text book.txt
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the commands and their options."""
    parser.epilog, parser.formatter_class = _EXAMPLES, argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (_demo, _quantize, _generate, _perplexity, _bench, _finetune, _export, _device):
        add(commands)


def run(args: argparse.Namespace) -> None:
    """Run the command that was given.

    Raises:
        JaxtapError: something that the user gave can't be used.
    """
    try:
        args.run(args)
    except OSError as error:
        raise LlmError(f"{error}.") from error


def _command(commands, name, run, text):
    parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser


def _demo(commands):
    def run(args):
        from . import demo

        demo.run(args.seconds, args.seed, args.save, args.windows)

    parser = _command(commands, "demo", run, "Train a small model, and compare formats on it.")
    parser.add_argument("--seconds", type=float, default=120, help="to train for (default 120)")
    parser.add_argument("--seed", type=int, default=0)
    text = "of 128 bytes, that perplexity is measured on (default 512)"
    parser.add_argument("--windows", type=_count, default=512, help=text)
    parser.add_argument("--save", help="a folder for the trained model, for the command quantize")


def _quantize(commands):
    def run(args):
        if args.bits is not None and args.calibrate is None:
            raise LlmError(
                "--bits needs --calibrate, a file of text to measure formats on. Add it."
            )
        given = _given(args) or "int4"
        shown = given if args.bits is None else f"{args.bits:g} bits a weight"
        # Before JAX is imported, which takes seconds.
        print(f"Quantizing {args.folder} into {args.out}: {shown}", file=sys.stderr, flush=True)
        import resource

        from . import calibrated, quantized

        if args.calibrate is None:
            plan = quantized.quantize(args.folder, args.out, given)
        else:
            text, bits = _read(args.calibrate), args.bits
            plan = calibrated.quantize(args.folder, args.out, given, bits, text, args.window)
        # On Linux in KiB, on macOS in bytes.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak *= 1 if sys.platform == "darwin" else 1024
        print(
            f"{args.out}: {quantized.size_of(args.out) / 1e6:.1f} MB, from "
            f"{plan.bytes_before / 1e6:.1f} MB in float32; peak memory {peak / 1e6:.0f} MB"
        )
        if args.plan:
            print(plan)

    parser = _command(commands, "quantize", run, "Quantize a Hugging Face folder.")
    text = "with config.json, safetensors files, tokenizer.json; or a float .gguf file"
    parser.add_argument("folder", help=text)
    parser.add_argument("out", help="folder to write; a run that was interrupted goes on in it")
    rules = _rules(parser, "int4")
    text = "of a weight on average, as 3.5: each kind of matrix gets a format (with --calibrate)"
    rules.add_argument("--bits", type=float, help=text)
    text = "a file of text: round for the least error on it (GPTQ), with the whole model in memory"
    parser.add_argument("--calibrate", metavar="FILE", help=text)
    text = "tokens of that text seen together (default 512)"
    parser.add_argument("--window", type=_count, default=512, help=text)
    parser.add_argument(
        "--plan", action="store_true", help="print what each operation is quantized to"
    )


def _generate(commands):
    def run(args):
        from .generate import Sampling
        from .serving import Exported, is_exported
        from .tokenizer import read_stops, read_tokenizer, stream_text

        sampling = Sampling(args.temperature, args.top_k, args.top_p)
        _keep_programs(args.compilation_cache)
        if is_exported(args.out):
            if args.cache or args.dtype:
                raise LlmError("--cache and --dtype are export's. Export again, or leave them out.")
            generator = Exported(args.out)
        else:
            _, generator = _open(args)
        tokenizer = read_tokenizer(args.out, generator.config)
        prompt = tokenizer.encode(args.prompt)
        stop = read_stops(args.out)
        blocks = generator.stream(
            [prompt], args.count, sampling, args.seed, stop, positions=args.context
        )
        ids = _until(stop, (one for block in blocks for one in block[0].tolist()))
        texts = stream_text(tokenizer, ids)
        first = next(texts)  # an error of the prompt comes before anything is shown
        for text in itertools.chain((args.prompt, first), texts):
            print(text, end="", flush=True)
        print()

    parser = _command(commands, "generate", run, "Continue a prompt.")
    parser.add_argument(
        "out", help="what quantize or export wrote, a folder of Hugging Face, or a .gguf file"
    )
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--count", type=_count, default=128, help="tokens (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest (default)")
    parser.add_argument("--top-k", type=int, default=0, help="draw from so many (default all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from this much probability")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--context", type=_count, help="positions of the cache (default: as needed)"
    )
    parser.add_argument("--compilation-cache", metavar="DIR", help="keep compiled programs in it")
    _forms(parser)


def _perplexity(commands):
    def run(args):
        from .folders import load
        from .losses import perplexity
        from .tokenizer import read_tokenizer

        text = _read(args.text)
        config, plan, params = load(args.out, args.dtype or "float32")
        tokens = read_tokenizer(args.out, config).encode(text)
        found = perplexity(config, params, tokens, plan, args.window, cache=args.cache)
        print(f"perplexity {found:.4f} of {len(tokens)} tokens in windows of {args.window}")

    parser = _command(commands, "perplexity", run, "Measure how well a model expects a text.")
    parser.add_argument(
        "out", help="what quantize wrote, a folder of Hugging Face, or a .gguf file"
    )
    parser.add_argument("text", help="a file of text")
    parser.add_argument("--window", type=_count, default=512, help="tokens (default 512)")
    _forms(parser, "decode token by token from such a cache (default: none, all at once)")


def _bench(commands):
    def run(args):
        from .bench import measure

        _, generator = _open(args)
        print("tokens a second: median, best")
        for name, middle, best in measure(
            generator, args.prompts, args.contexts, args.steps, args.rounds, args.batch
        ):
            print(f"{name:16} {middle:10.1f} {best:10.1f}", flush=True)

    parser = _command(commands, "bench", run, "Time prefill and decoding.")
    parser.add_argument(
        "out", help="what quantize wrote, a folder of Hugging Face, or a .gguf file"
    )
    parser.add_argument("--prompts", type=_count, nargs="*", default=[128, 512])
    parser.add_argument("--contexts", type=_count, nargs="*", default=[128, 1024])
    parser.add_argument("--steps", type=_count, default=64)
    parser.add_argument("--rounds", type=_count, default=5)
    parser.add_argument("--batch", type=_count, default=1)
    _forms(parser)


def _finetune(commands):
    def run(args):
        out = args.out or f"{Path(args.folder).resolve().name}-tuned"
        print(f"Fine-tuning {args.folder} on {args.data}: {out}", file=sys.stderr, flush=True)
        from . import curves
        from .training import Recipe, finetune

        names = [field.name for field in dataclasses.fields(Recipe)]
        given = {name: value for name in names if (value := getattr(args, name)) is not None}
        curve = finetune(args.folder, args.data, out, _given(args), Recipe(**given))
        print(f"{len(curve)} steps; loss in nats a token:\n{curves.show(curve)}")
        print(f"{out}: for generate, perplexity and export; {out}/{curves.PAGE} shows the loss")

    text = "Train adapters beside a quantized model, on a text (QLoRA)."
    parser = _command(commands, "finetune", run, text)
    parser.add_argument(
        "folder", help="of Hugging Face, float or quantized; quantize's; or a .gguf file"
    )
    parser.add_argument(
        "data", help="a text; or .jsonl, with a text, or a prompt and a completion, in each line"
    )
    parser.add_argument(
        "--out", help="folder to write (default FOLDER-tuned); an interrupted run goes on in it"
    )
    _rules(parser, "nf4, for a float folder")
    parser.add_argument("--rank", type=_count, help="of the adapters (default 16)")
    parser.add_argument("--alpha", type=float, help="they are scaled by it / rank (default 2 rank)")
    parser.add_argument("--dropout", type=float, help="of what they see (default 0)")
    parser.add_argument("--rate", type=float, help="of Adam, at its highest (default 2e-4)")
    parser.add_argument("--epochs", type=float, help="how often all is seen (default 1)")
    parser.add_argument("--steps", type=_count, help="instead of --epochs")
    parser.add_argument("--length", type=_count, help="tokens of a row of documents (default 512)")
    parser.add_argument("--batch", type=_count, help="rows at once (default 1)")
    parser.add_argument("--accumulate", type=_count, help="batches of a step (default 8)")
    parser.add_argument("--every", type=_count, help="steps between checkpoints (default 20)")
    parser.add_argument("--seed", type=int, help="(default 0)")
    parser.add_argument("--dtype", choices=DTYPES, help="of activations (default float32)")


def _export(commands):
    def run(args):
        kind = "adapter" if args.adapter else "merged" if args.merged else None
        if kind is None and (args.gguf or args.format):
            raise LlmError("--gguf and --format need --adapter or --merged. Add one.")
        if kind is not None and any((args.prompt, args.positions, args.cache, args.dtype)):
            raise LlmError(
                "--prompt, --positions, --cache and --dtype are of programs. Leave them out, or "
                f"--{kind}."
            )
        if kind == "adapter" and args.format:
            raise LlmError("--format is for --merged: adapters are float32. Leave it out.")
        if kind is None:
            from .serving import export

            prompt, positions = args.prompt or 128, args.positions or 1024
            plan, generator = _open(args)
            export(args.out, args.programs, generator, plan, prompt, positions)
            print(f"{args.programs}: prompts of {prompt} tokens, {positions} positions")
            return
        if Path(args.programs).exists():
            raise LlmError(f"{args.programs} already exists. Remove it, or name another.")
        from . import adapters, gguf, merged, peft

        if adapters.is_finetuned(args.out):
            tuned = adapters.read(args.out)
            if tuned.step < tuned.of:
                print(f"{args.out} is trained to step {tuned.step} of {tuned.of}", file=sys.stderr)
        if kind == "adapter":
            (gguf.export_adapter if args.gguf else peft.export)(args.out, args.programs)
        else:
            (gguf.export if args.gguf else merged.export)(args.out, args.programs, args.format)
        print(f"Wrote {args.programs}.")

    text = "Write lowered programs, from which generate starts quickly; or files for others."
    parser = _command(commands, "export", run, text)
    parser.add_argument(
        "out", help="what quantize or finetune wrote, a folder of Hugging Face, or a .gguf file"
    )
    parser.add_argument("programs", metavar="to", help="folder or file to write")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--adapter", action="store_true", help="the adapters, for PEFT")
    kinds.add_argument(
        "--merged", action="store_true", help="the model with its adapters, for Hugging Face"
    )
    parser.add_argument("--gguf", action="store_true", help="either of them, for llama.cpp")
    parser.add_argument(
        "--format", help="of --merged: float32, bfloat16, float16, int8, w8a8, int4 (default the "
        "model's dtype); with --gguf f32, f16 (default), bf16, q8_0, q4_0"
    )  # fmt: skip
    parser.add_argument("--prompt", type=_count, help="of programs, at most (default 128)")
    parser.add_argument("--positions", type=_count, help="of their cache (default 1024)")
    _forms(parser)


def _device(commands):
    def run(args):
        from . import checkpoint, device, floats, folders
        from .tokenizer import read_tokenizer

        if not args.out.parent.is_dir():
            raise LlmError(f"{args.out} must be in a folder that is there. Make it first.")
        if Path(args.folder).exists() and not folders.is_float(args.folder):
            raise LlmError(f"{args.folder} must have a float model, got a quantized one.")
        read = floats.opened(args.folder)
        config, params = read.config, checkpoint.gathered(read.config, read.get)
        tokens = None
        if args.text is not None:
            tokens = read_tokenizer(args.folder, config).encode(_read(args.text))
            if len(tokens) < 2:
                raise LlmError(f"{args.text} must have two tokens or more, got {len(tokens)}.")
        bundle = None
        if args.out.suffix == ".litertlm":
            from .bundle import Bundle

            bundle = Bundle(args.folder, args.positions)
        art = device.export(config, params, args.preset, args.prompt, args.positions)
        if bundle is None:
            art.save(args.out)
        else:
            bundle.write(args.out, art.model)
        print(art.report)
        print(f"{args.out}: {len(art.model) / 1e6:.1f} MB")
        if tokens is not None:
            print(f"{'':20} {'JAX float':>12} {'device':>12}")
            for name, *found in device.compare(device.Device(art.model), config, params, tokens):
                print(f"{name:20} {found[0]:12.4g} {found[1]:12.4g}", flush=True)

    parser = _command(commands, "device", run, "Export a float folder for LiteRT, and compare.")
    parser.add_argument("folder", help="with config.json, safetensors files, tokenizer.json")
    parser.add_argument(
        "out", type=Path, help="the .tflite, or .litertlm with the tokenizer, to write"
    )
    parser.add_argument("--preset", choices=DEVICE, default="dynamic", help="(default dynamic)")
    parser.add_argument(
        "--prompt", type=_count, default=64, help="tokens of a prefill (default 64)"
    )
    parser.add_argument("--positions", type=_count, default=256, help="of the cache (default 256)")
    parser.add_argument("--text", help="a file of text to compare on, with the float program")


def _count(text):
    """Return a number of things, from an argument."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, got {text}")
    return int(text)


def _rules(parser, default):
    rules = parser.add_mutually_exclusive_group()
    rules.add_argument("--preset", choices=FORMATS, help=f"of all weights (default {default})")
    rules.add_argument("--rules", metavar="FILE", help="JSON: a list of fields of rules")
    return rules


def _given(args):
    """Return the rules that were given, or None."""
    return args.preset or args.rules


def _forms(parser, text="format of the KV cache (default float)"):
    parser.add_argument("--cache", choices=CACHES, help=text)
    text = "of activations, and of what is not quantized (default float32)"
    parser.add_argument("--dtype", choices=DTYPES, help=text)


def _keep_programs(folder):
    """Let JAX keep all compiled programs in a folder, however small, and take them from there."""
    if folder is None:
        return
    import jax

    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise LlmError(f"--compilation-cache must be a folder, got the file {path}.")
    jax.config.update("jax_compilation_cache_dir", str(path.absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _open(args):
    """Return the plan and the generator of a quantized folder."""
    import jax.numpy as jnp

    from .folders import load
    from .generate import Generator

    dtype = args.dtype or "float32"
    config, plan, params = load(args.out, dtype)
    cache = args.cache or "float"
    return plan, Generator(config, params, plan, jnp.dtype(dtype), cache)


def _read(path):
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise LlmError(f"{path} must be a file of text: {error}.") from error


def _until(stop, ids):
    for one in ids:
        if one in stop:
            return
        yield one
