"""Photographs that scikit-image ships, as the network takes them."""

import importlib.util

import numpy as np

from .load import GROUP, NotInstalled
from .model import SIZE

CLASSES = {
    "chelsea": (281, 282, 285),  # a tabby, a tiger cat, an Egyptian cat
    "rocket": (657, 744, 812),  # a missile, a projectile, a space shuttle
    "coffee": (504, 967, 968),  # a coffee mug, an espresso, a cup
}
"""What some of them show: any of these classes of ImageNet."""

NAMES = (*CLASSES, "astronaut", "stereo_motorcycle", "camera", "coins", "moon")
OTHERS = (
    *("brick", "grass", "gravel", "hubble_deep_field", "retina", "immunohistochemistry"),
    *("cell", "clock", "colorwheel", "logo", "page", "text"),
)
"""What ranges are calibrated with: nothing that is classified."""

MIDDLE = (0.5, 0.5)
PLACES = (MIDDLE, (0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0))
"""Where squares are cut out of a photograph, down and across: the middle and the corners."""
CROP = 0.875
"""The part of a side that the middle of a photograph is, as its authors cut it."""


def read(names=NAMES, places=(MIDDLE,)):
    """Returns float32 ``[photographs * places, SIZE, SIZE, 3]``, from -1 to 1.

    Args:
        names: of functions of ``skimage.data``.
        places: where a square is cut, down and across: from 0 to 1.

    Raises:
        NotInstalled: scikit-image is missing.
    """
    if importlib.util.find_spec("skimage") is None:
        raise NotInstalled(f"The photographs need skimage. Install {GROUP}.")
    from skimage import data

    def photograph(name):
        found = getattr(data, name)()
        return found[0] if isinstance(found, tuple) else found

    return np.stack([cut(photograph(name), *place) for name in names for place in places])


def calibrating():
    """Returns images to calibrate ranges with."""
    return read(OTHERS)


def cut(photograph, down, across):
    """Returns a square of a photograph, scaled: float32 ``[SIZE, SIZE, 3]``, from -1 to 1.

    Args:
        photograph: uint8 ``[height, width]``, or with 3 or 4 channels.
        down: where, from 0 to 1.
        across: the same.
    """
    from PIL import Image

    if photograph.ndim == 2:
        photograph = np.repeat(photograph[..., None], 3, axis=2)
    photograph = photograph[..., :3]  # without how opaque it is
    height, width = photograph.shape[:2]
    side = round(CROP * min(height, width))
    top, left = round(down * (height - side)), round(across * (width - side))
    square = Image.fromarray(photograph[top : top + side, left : left + side])
    scaled = np.asarray(square.resize((SIZE, SIZE), Image.Resampling.BICUBIC), np.float32)
    return (scaled - 127) / 128
