"""Operations that quantize their operands and know their derivatives."""
