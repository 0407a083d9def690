"""Calibration methods: how the range that quantized values cover is found."""

import dataclasses
import functools
import math

_METHODS = (
    '"absmax[,factor]", "minmax[,factor]", "rms,factor", "fixed,bound", "fixed,min,max", '
    '"percentile,p" with 50 < p <= 100, and "mse[,steps]"'
)


@dataclasses.dataclass(frozen=True)
class CalibrationMethod:
    """A calibration method.

    Attributes:
      name: one of the names of ``parse_calibration_method``.
      args: its numbers; "fixed" has a min and a max.
    """

    name: str
    args: tuple[float, ...] = ()

    @property
    def is_symmetric(self) -> bool:
        """Return whether the range is ``[-upper, upper]``, without a zero point."""
        if self.name == "fixed":
            return self.args[0] == -self.args[1]
        return self.name != "minmax"

    @property
    def clips(self) -> bool:
        """Return whether data can lie outside the range."""
        if self.name in ("absmax", "minmax"):
            return self.factor < 1
        return not (self.name == "percentile" and self.args[0] == 100)

    @property
    def factor(self) -> float:
        """Return what the data's range is multiplied by."""
        return self.args[0] if self.args else 1.0


@functools.lru_cache
def parse_calibration_method(text: str) -> CalibrationMethod:
    """Parse a calibration method: a name and numbers, between commas.

    Args:
      text: one of

        - "absmax[,factor]": the largest magnitude (times the factor).
        - "minmax[,factor]": from the least to the greatest value (times the factor), extended to
          contain 0. It has a zero point, so only integer formats take it.
        - "rms,factor": the root of the mean square, times the factor.
        - "fixed,bound" and "fixed,min,max": a range that no data changes; min <= 0 <= max.
        - "percentile,p": the p-th percentile of the magnitudes, 50 < p <= 100.
        - "mse[,steps]": of `steps` (32) ranges between 0.3 and 1 times the largest magnitude, that
          with the least squared error of quantizing.

    Raises:
      ValueError: an unknown name, or numbers that do not fit it.
    """
    name, *rest = (part.strip().lower() for part in text.split(","))
    try:
        args = tuple(float(part) for part in rest)
    except ValueError:
        raise _bad_method(text, "what follows the name must be numbers") from None
    if not all(map(math.isfinite, args)):
        raise _bad_method(text, "the numbers must be finite")
    if name in ("absmax", "minmax"):
        if len(args) > 1 or any(a <= 0 for a in args):
            raise _bad_method(text, "it takes at most one number, a factor above 0")
    elif name == "rms":
        if len(args) != 1 or args[0] <= 0:
            raise _bad_method(text, "it takes one number, a factor above 0")
    elif name == "fixed":
        args = (-args[0], args[0]) if len(args) == 1 else args
        if len(args) != 2 or not args[0] <= 0 <= args[1] or args[0] == args[1]:
            raise _bad_method(text, "it takes a bound, or a min <= 0 and a max >= 0 that differ")
    elif name == "percentile":
        if len(args) != 1 or not 50 < args[0] <= 100:
            raise _bad_method(text, "it takes one number p, 50 < p <= 100")
    elif name == "mse":
        if len(args) > 1 or any(a < 2 or a != int(a) for a in args):
            raise _bad_method(text, "it takes at most one whole number of steps, 2 or more")
    else:
        raise _bad_method(text, f"the method {name!r} does not exist")
    return CalibrationMethod(name, args)


def _bad_method(text: str, why: str) -> ValueError:
    return ValueError(
        f"a calibration method must be one of {_METHODS}, got {text!r}: {why}. Choose another."
    )
