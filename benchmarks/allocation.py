"""Qtypes by allocation beside the same qtype everywhere: accuracy per bit, as Markdown.

uv run --group minilm python -m benchmarks.allocation [digits] [minilm] [tiles] [estimates]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from provider_xla import PtqProvider, QuantizationRule

QTYPES = ("int2", "int3", "int4", "int5", "int6", "int8")
SIZES = ("int3", "int4", "int6")
"""The uniform qtypes whose size is the budget."""
DIGITS_BATCH = 256
COTANGENTS = 32


def main():
    parts = sys.argv[1:] or ["digits", "minilm", "tiles", "estimates"]
    for part in parts:
        {"digits": digits, "minilm": minilm, "tiles": tiles, "estimates": estimates}[part]()


def compared(plan_of, params, batch, score, tiles):
    """Yields rows: how, bits, and what ``score`` tells of the quantized parameters.

    Args:
        plan_of: returns the plan of a qtype and tiles for all.
        params: the parameters.
        batch: what bits are given by.
        score: returns the cells of a plan and its stored parameters; sees other data.
        tiles: elements per scale, or None.
    """
    wide = plan_of("int8", tiles)
    elements = sum(int(np.prod(w.shape)) for w in wide.weights.values())
    rest = wide.bytes_before - sum(w.bytes_before for w in wide.weights.values())
    plans = {name: plan_of(name, tiles) for name in QTYPES}
    errors = None
    for name in QTYPES[1:]:
        yield [name, bits_of(plans[name], rest, elements), *score(plans[name])]
    for name in SIZES:
        size = plans[name].bytes_after
        made = wide.allocate(params, *batch, budget_bytes=size, qtypes=QTYPES, errors=errors)
        errors = made.allocation.errors
        print(f"\nAt the size of {name}, tiles {tiles}\n\n{made.allocation}\n", file=sys.stderr)
        yield [f"allocated, size of {name}", bits_of(made, rest, elements), *score(made)]


def bits_of(plan, rest, elements):
    return f"{8 * (plan.bytes_after - rest) / elements:.2f}"


def plan_maker(fn, params, example, before=()):
    """Returns a function of a qtype and tiles that plans these for all parameters, in XLA."""

    def plan_of(qtype, tiles):
        rules = [
            *before,
            QuantizationRule(op_names=["take"], weight_qtype=qtype, tile_size=tiles),
            QuantizationRule(weight_qtype=qtype, tile_size=tiles),
        ]
        if not before:
            rules = rules[1:]
        return PtqProvider(rules).plan(fn, params, *example, kernels=False)

    return plan_of


def digits():
    """Both models of ``jaxtap demo``, on the images that they weren't trained on."""
    from interception_core.demo_kit import Digits
    from jaxtap.demo import MODELS, train

    print("| model | tiles | weights | bits | error, test images | accuracy | same digit |")
    print("| --- " * 7 + "|")
    data = Digits.load(0)
    batch, test = (data.train_images[:DIGITS_BATCH],), data.test_images
    for model in MODELS:
        params = train(model, data, 0, lambda: None)
        logits = np.asarray(jax.jit(model.apply)(params, test))

        def score(plan, model=model, params=params, logits=logits):
            found = np.asarray(jax.jit(plan.apply(model.apply))(plan.quantize(params), test))
            right = (found.argmax(-1) == data.test_labels).mean()
            same = (found.argmax(-1) == logits.argmax(-1)).mean()
            error = ((found - logits) ** 2).sum() / (logits**2).sum()
            return [f"{error:.5f}", f"{right:.2%}", f"{same:.2%}"]

        in_float = (logits.argmax(-1) == data.test_labels).mean()
        print(f"| {model.name} |  | float | 32 |  | {in_float:.2%} |  |")
        # Neither the rows of pixels nor convolutions can be tiled by 32; tiles of 8 fit attention.
        for tiles in (None, 8) if model.name == "attention" else (None,):
            plan_of = plan_maker(model.apply, params, batch)
            for row in compared(plan_of, params, batch, score, tiles):
                print("| " + " | ".join([model.name, str(tiles or "no"), *row]) + " |", flush=True)


def halves():
    """Returns the parameters of MiniLM, and its sentences: to allocate by, and to evaluate on."""
    from examples.minilm import load
    from examples.minilm.sentences import SENTENCES

    tokenize = load.read_tokenizer()
    params = jax.device_put(load.read_params())
    return params, *(tuple(map(jnp.asarray, tokenize(SENTENCES[i::2]))) for i in (0, 1))


def score_sentences(params, batch):
    """Returns a function of a plan: error and cosines of embeddings to those in float."""
    from examples.minilm import model

    expected = np.asarray(jax.jit(model.encode)(params, *batch))

    def score(plan):
        found = np.asarray(jax.jit(plan.apply(model.encode))(plan.quantize(params), *batch))
        cosine = (found * expected).sum(-1)
        error = ((found - expected) ** 2).sum() / (expected**2).sum()
        return [f"{error:.5f}", f"{cosine.min():.4f}", f"{cosine.mean():.4f}"]

    return score


def minilm():
    """The sentence encoder; its table of words is among the parameters, and half of them."""
    from examples.minilm import model
    from examples.minilm.rules import ATTENTION

    params, calibration, evaluation = halves()
    score = score_sentences(params, evaluation)
    plan_of = plan_maker(model.encode, params, calibration, before=[ATTENTION])
    print("| tiles | weights | bits | error | cosine, least | mean |")
    print("| --- " * 6 + "|")
    for tiles in (None, 32):
        for row in compared(plan_of, params, calibration, score, tiles):
            print("| " + " | ".join([str(tiles or "no"), *row]) + " |", flush=True)


def tiles():
    """The sentence encoder at the size of int4 per channel, in tiles where that is better."""
    from examples.minilm import model
    from examples.minilm.rules import ATTENTION

    params, calibration, evaluation = halves()
    score = score_sentences(params, evaluation)
    plan_of = plan_maker(model.encode, params, calibration, before=[ATTENTION])
    uniform = plan_of("int4", None)
    made = uniform.allocate(
        params,
        *calibration,
        budget_bytes=uniform.bytes_after,
        qtypes=("int3", "int4", "int5"),
        tile_size=[None, 128],
    )
    print(made.allocation, file=sys.stderr)
    print("| weights | bytes | error | cosine, least | mean |\n" + "| --- " * 5 + "|")
    for name, plan in {"int4": uniform, "allocated, with tiles of 128 or none": made}.items():
        print("| " + " | ".join([name, f"{plan.bytes_after:,}", *score(plan)]) + " |", flush=True)


def estimates():
    """What errors of single parameters are measured by, at the size of int4 in tiles of 32.

    Of the output (what ``allocate`` does); of the output to first order, by the gradients of
    ``COTANGENTS`` random sums of it; of the operation of the parameter, over its norm; of the
    parameter, over its norm.
    """
    from examples.minilm import model
    from examples.minilm.rules import ATTENTION

    from provider_xla.measure.probe import probe

    params, calibration, evaluation = halves()
    score = score_sentences(params, evaluation)
    plan_of = plan_maker(model.encode, params, calibration, before=[ATTENTION])
    wide = plan_of("int8", 32)
    plans = {name: plan_of(name, 32) for name in QTYPES}
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    leaves = {"args[0]" + jax.tree_util.keystr(path): leaf for path, leaf in leaves}

    def lost(path, name):
        stored = plans[name].weights[path]._quantize(leaves[path])
        stored = qn.unpack(stored) if isinstance(stored, qn.PackedQArray) else stored
        return qn.dequantize(stored) - leaves[path]

    def relative(error, whole):
        return float(jnp.sum(error**2) / jnp.sum(whole**2))

    def of_operations():
        def visit(site):
            side = 0 if site.weights[0] is not None else 1
            sums = []
            for name in (None, *QTYPES):
                operands = list(site.operands)
                if name is not None:
                    how = plans[name]._rules.how(plans[name]._rules.rules[site.index], True)
                    w = operands[side]
                    operands[side] = qn.dequantize(site.contraction.quantize(side, w, how)) - w
                sums.append(jnp.sum(site.contraction.run(*operands, *site.extras) ** 2))
            return jnp.stack(sums)

        by_op = {op.op_id: op.paths[0] for op in wide.ops if op.paths}
        found = {
            by_op[op_id]: np.asarray(one.total)
            for op_id, one in probe(wide, params, [calibration], visit).items()
        }
        ids = calibration[0][calibration[1]]
        return {
            path: dict(zip(QTYPES, (found[path][1:] / found[path][0]).tolist(), strict=True))
            if path in found
            else {name: relative(lost(path, name)[ids], leaves[path][ids]) for name in QTYPES}
            for path in wide.weights
        }

    def of_gradients():
        # The square of a change along the gradient of a sum with normal weights is, on average,
        # the sum of the squares of what changes.
        def gradients(params, tokens, mask, weights):
            return jax.grad(lambda p: jnp.sum(model.encode(p, tokens, mask) * weights))(params)

        shape = jax.eval_shape(model.encode, params, *calibration).shape
        norm = jnp.sum(model.encode(params, *calibration) ** 2)
        changes = {path: {name: lost(path, name) for name in QTYPES} for path in wide.weights}
        sums = {path: dict.fromkeys(QTYPES, 0.0) for path in wide.weights}
        run = jax.jit(gradients)
        for key in jax.random.split(jax.random.key(0), COTANGENTS):
            found = run(params, *calibration, jax.random.normal(key, shape))
            found, _ = jax.tree_util.tree_flatten_with_path(found)
            found = {"args[0]" + jax.tree_util.keystr(path): leaf for path, leaf in found}
            for path, row in changes.items():
                for name, change in row.items():
                    along = jnp.vdot(found[path], change)
                    sums[path][name] += float(along**2 / norm / COTANGENTS)
        return sums

    of_parameters = {
        path: {name: relative(lost(path, name), leaves[path]) for name in QTYPES}
        for path in wide.weights
    }
    print("| error of | error | cosine, least | mean |\n" + "| --- " * 4 + "|")
    for what, errors in {
        "the output": {},
        "the output, by gradients": of_gradients(),
        "the operation": of_operations(),
        "the parameter": of_parameters,
    }.items():
        made = wide.allocate(
            params,
            *calibration,
            budget_bytes=plans["int4"].bytes_after,
            qtypes=QTYPES,
            errors={(path,): row for path, row in errors.items()},
        )
        print("| " + " | ".join([what, *score(made)]) + " |", flush=True)


if __name__ == "__main__":
    main()
