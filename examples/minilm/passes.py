"""Calibrates all-MiniLM-L6-v2 with passes, and prints what each makes of 4 bits.

uv run --group minilm python -m examples.minilm.passes

Calibrated on ``CALIBRATION`` and every other sentence of sentences.py, measured on ``FRESH`` and
those between.
"""

import argparse
from typing import NamedTuple

import jax
import numpy as np

import provider_xla as xla

from . import load, model
from .rules import TABLE
from .sentences import SENTENCES

CALIBRATION = (
    "The museum opens at ten and closes when the last visitor has left.",
    "Add a pinch of salt and stir until the sauce thickens.",
    "Our flight was delayed by three hours because of fog.",
    "What is the capital of Mongolia?",
    "The function returns None when the key is missing.",
    "He repaired the clock with a screwdriver and a great deal of patience.",
    "Shares of the company fell 4.2% after the announcement.",
    "My grandmother grew tomatoes on her balcony every summer.",
    "Please restart the router and wait for two minutes.",
    "The defendant was acquitted for lack of evidence.",
    "Plants absorb water through their roots.",
    "def add(a, b): return a + b",
    "The orchestra rehearsed the second movement until midnight.",
    "A mild earthquake was felt along the coast this morning.",
    "Vaccines train the immune system to recognise a pathogen.",
    "Are you coming to the party on Saturday?",
    "The invoice is due within 30 days of receipt.",
    "Two teams are tied for first place with one match left.",
    "Sehr geehrte Damen und Herren, vielen Dank für Ihre Nachricht.",
    "Le chat dort sur le canapé.",
    "Gravity bends the path of light near a massive star.",
    "I can't find my keys anywhere.",
    "Thanks!",
    "The warranty covers parts and labour for a period of two years from the date of purchase,"
    " unless the damage was caused by improper use, by water, or by a repair that was carried out"
    " by a person whom we have not authorised.",
    "Snow is expected above 800 metres, with gusts of up to 90 km/h on exposed ridges.",
    "She learned to code at sixty and wrote an app for her choir.",
    "Error 404: page not found",
    "The recipe calls for 250 g of flour, two eggs and half a litre of milk.",
    "Despite heavy rain the parade went ahead, and thousands lined the streets under umbrellas.",
    "Investors worry that inflation will stay high for longer than the bank expects.",
    "Turn left after the bridge, then take the second exit.",
    "The novel follows three generations of a family of fishermen on a northern island.",
)
FRESH = (
    "Yes, of course.",
    "Where is the nearest pharmacy?",
    "A pelican can hold more fish in its beak than in its belly.",
    "The contract was terminated without notice.",
    "print(sorted(words, key=len)[:10])",
    "Temperatures dropped below zero for the first time this year.",
    "The surgeon washed her hands and put on a fresh pair of gloves.",
    "Buy one, get one free!",
    "It was the quietest night that the harbour had known since the storm.",
    "Il treno per Roma parte dal binario 4.",
    "The square root of 144 is 12.",
    "Candidates must hold a valid driving licence and be willing to work in shifts, including"
    " weekends and public holidays, for which an additional allowance is paid.",
    "Lithium batteries must not be carried in checked luggage.",
    "He whistled the same tune all day.",
    "Quantum computers use superposition and entanglement.",
    "Our goldfish is called Admiral.",
    "java.lang.NullPointerException at Main.run(Main.java:17)",
    "The mayor cut the ribbon, the band played, and the first tram in forty years rolled out.",
    "How much does a return ticket cost?",
    "Volcanic ash makes the soil fertile.",
)
BATCH = 16


def rule(weight, **fields):
    return [TABLE, xla.QuantizationRule(weight_qtype=weight, **fields)]


RULES = {
    "int4 per channel": rule("int4"),
    "int4 in tiles of 32": rule("int4", tile_size=32),
    "int4, activations int8, per channel": rule("int4", act_qtype="int8"),
    "int8, activations int8, per channel": rule("int8", act_qtype="int8"),
    "int4 in tiles of 32, 2:4 sparse": rule("int4", tile_size=32, sparsity="2:4"),
    "nvfp4": rule("nvfp4"),
}
WEIGHTS = {
    "rounding": [],
    "Awq, no clipping": [xla.Awq(clip=1)],
    "Awq": [xla.Awq()],
    "Hadamard": [xla.Hadamard()],
    "Gptq": [xla.Gptq()],
    "Gptq in 24 parts": [xla.Gptq(sequential=24)],
    "Awq, Gptq": [xla.Awq(), xla.Gptq()],
    "Hadamard, Gptq": [xla.Hadamard(), xla.Gptq()],
    "Hadamard, Gptq in 24 parts": [xla.Hadamard(), xla.Gptq(sequential=24)],
    "Hadamard, Awq, Gptq": [xla.Hadamard(), xla.Awq(), xla.Gptq()],
}
ACTIVATIONS = {
    "rounding": [],
    "SmoothQuant": [xla.SmoothQuant()],
    "Hadamard": [xla.Hadamard()],
    "Gptq": [xla.Gptq()],
    "SmoothQuant, Gptq": [xla.SmoothQuant(), xla.Gptq()],
    "Hadamard, Gptq": [xla.Hadamard(), xla.Gptq()],
}
SPARSE = {
    "rounding": [],
    "Wanda": [xla.Wanda()],
    "Gptq": [xla.Gptq()],
    "Wanda, Gptq": [xla.Wanda(), xla.Gptq()],
}
PASSES = dict.fromkeys(RULES, WEIGHTS) | {
    "int4, activations int8, per channel": ACTIVATIONS,
    "int8, activations int8, per channel": ACTIVATIONS,
    "int4 in tiles of 32, 2:4 sparse": SPARSE,
    "nvfp4": {name: WEIGHTS[name] for name in ("rounding", "Gptq", "Hadamard, Gptq")},
}


def main():
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m examples.minilm.passes", description=__doc__)
    parser.add_argument("--rule", choices=list(RULES), action="append", help="all by default")
    parser.add_argument("--report", action="store_true", help="print each parameter's errors, too")
    args = parser.parse_args()
    params, tokenize = jax.device_put(load.read_params()), load.read_tokenizer()
    batches, held_out = split(tokenize)
    for name in args.rule or RULES:
        print(f"\n**{name}**\n")
        print("| passes | mean cosine | least | SQNR, dB |\n| --- | --- | --- | --- |")
        for row in measure(params, RULES[name], PASSES[name], batches, held_out):
            print(f"| {row.name} | {row.mean:.4f} | {row.least:.4f} | {row.sqnr:.1f} |", flush=True)
            if args.report:
                print(row.report)


class Row(NamedTuple):
    """What a list of passes gives: cosines of the embeddings to float, their SQNR in dB."""

    name: str
    mean: float
    least: float
    sqnr: float
    report: xla.PassReport


def split(tokenize):
    """Returns the batches to calibrate on and those to measure on, with other sentences."""

    def batches(sentences):
        # By length, so that little is padded: a padded position is a row like any other.
        ordered = sorted(sentences, key=lambda text: len(tokenize([text])[0][0]))
        return [tokenize(ordered[i : i + BATCH]) for i in range(0, len(ordered), BATCH)]

    return batches((*CALIBRATION, *SENTENCES[::2])), batches((*FRESH, *SENTENCES[1::2]))


def measure(params, rules, variants, batches, held_out):
    """Yields a row by list of passes."""
    plan = xla.PtqProvider(rules).plan(model.encode, params, *batches[0], kernels=False)
    encode = jax.jit(model.encode)
    expected = np.concatenate([encode(params, *batch) for batch in held_out])
    quantized = jax.jit(plan.apply(model.encode))
    for name, passes in variants.items():
        stored, report = plan.optimize(params, batches, passes)
        found = np.concatenate([quantized(stored, *batch) for batch in held_out])
        cosines = (found * expected).sum(-1)
        sqnr = 10 * np.log10(np.square(expected).sum() / np.square(found - expected).sum())
        yield Row(name, float(cosines.mean()), float(cosines.min()), float(sqnr), report)


if __name__ == "__main__":
    main()
