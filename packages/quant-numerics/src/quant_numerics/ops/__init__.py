"""Operations on QArrays: contractions, convolutions, lookups."""
