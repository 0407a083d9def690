"""What llama.cpp calls kinds of tokens, and the patterns that texts are cut by."""

BYTES = 256
"""Tokens of a model whose tokens are bytes."""
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
"""llama.cpp's types of tokens (``gguf.TokenType``)."""
SPACE = "\u2581"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?%s+|\p{N}%s| ?[^\s%s\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s",
        r"\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLITS = {
    _WORDS % (r"\p{L}", "{1,3}", r"\p{L}"): "llama-bpe",
    _WORDS % (r"\p{L}", "", r"\p{L}"): "qwen2",
    _WORDS % (r"[\p{L}\p{M}]", "", r"\p{L}\p{M}"): "qwen35",
    _CASED % (_ENDING, _ENDING, "{1,3}"): "gpt-4o",
    _CASED % ("", "", ""): "tekken",
}
"""What llama.cpp calls the patterns that text is cut by before its bytes are merged."""
