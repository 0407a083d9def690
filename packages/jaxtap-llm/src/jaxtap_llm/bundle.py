"""A ``.litertlm``: a decoder's LiteRT file with its tokenizer, which LiteRT-LM opens.

Written by LiteRT-LM's own builder, https://ai.google.dev/edge/litert-lm/file_builder.
"""

from __future__ import annotations

import importlib
import itertools
import tempfile
from pathlib import Path
from typing import Any

from . import beside
from .config import LlmError
from .tokenizer import byte_level, read_stops

try:
    import litert_lm_builder

    from provider_odml.features import save

    # Imported like this since generated modules have no types.
    llm_metadata_pb2: Any = importlib.import_module(
        "litert_lm_builder.runtime.proto.llm_metadata_pb2"
    )
except ModuleNotFoundError as error:
    raise LlmError(
        f"A .litertlm needs {error.name}, which is not installed. Run pip install "
        '"jaxtap-llm[device]", or write a .tflite.'
    ) from error


class Bundle:
    """What a bundle has beside the model: read before that is exported, which takes minutes.

    Args:
        folder: of the model, with its tokenizer.json; one without has bytes as tokens.
        positions: tokens that a conversation may have.

    Raises:
        LlmError: a file of the folder is damaged, or none says what ends a text.
    """

    def __init__(self, folder: Any, positions: int) -> None:
        text = beside.text_of(folder, beside.TOKENIZER)
        self._tokenizer = byte_level().to_str() if text is None else text
        self._metadata = _metadata(Path(folder), self._tokenizer, positions)

    def write(self, path: Any, model: Any) -> None:
        """Write the bundle: all of it, or nothing.

        Args:
            path: where to.
            model: bytes of the .tflite, with the signatures of ``device.export``.
        """
        # The builder takes files, and writes where it can seek.
        with tempfile.TemporaryDirectory() as name:
            parts = Path(name)
            (parts / "model.tflite").write_bytes(model)
            (parts / "tokenizer.json").write_text(self._tokenizer)
            (parts / "metadata.pb").write_bytes(self._metadata.SerializeToString())
            builder = litert_lm_builder.LitertLmFileBuilder()
            strings = litert_lm_builder.DType.STRING
            builder.add_system_metadata(litert_lm_builder.Metadata("Authors", "jaxtap", strings))
            builder.add_llm_metadata(str(parts / "metadata.pb"))
            builder.add_hf_tokenizer(str(parts / "tokenizer.json"))
            builder.add_tflite_model(
                str(parts / "model.tflite"), litert_lm_builder.TfLiteModelType.PREFILL_DECODE
            )
            with (parts / "bundle").open("wb") as file:
                builder.build(file, validate_metadata=True)
            save(path, (parts / "bundle").read_bytes())


def _metadata(folder: Any, tokenizer: Any, positions: int) -> Any:
    """Return what LiteRT-LM reads of a model beside its tensors."""
    from tokenizers import Tokenizer

    stops = read_stops(folder)
    if not stops:
        raise LlmError(
            f"{folder} must say which tokens end a text, as LiteRT-LM asks. Add eos_token_id to "
            "its config.json, or write a .tflite."
        )
    found = llm_metadata_pb2.LlmMetadata(
        max_num_tokens=positions, supports_thinking=False, supports_function_calling=False
    )
    found.llm_model_type.generic_model.SetInParent()
    # What the tokenizer itself puts before a text, and not behind it: LiteRT-LM encodes without.
    text = Tokenizer.from_str(tokenizer).encode("a")
    pairs = zip(text.ids, text.special_tokens_mask, strict=True)
    begin = [one for one, _ in itertools.takewhile(lambda pair: pair[1], pairs)]
    if begin:
        found.start_token.token_ids.ids.extend(begin)
    for one in stops:
        found.stop_tokens.add().token_ids.ids.append(one)
    template = beside.template_of(folder)
    if template is not None:
        found.jinja_prompt_template = template
    return found
