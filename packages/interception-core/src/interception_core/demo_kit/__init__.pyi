"""The public names, and the modules that they are from."""

from .digits import BATCH as BATCH
from .digits import Digits as Digits
from .digits import train as train
from .shell import configure as configure
from .shell import print_table as print_table
from .shell import progress as progress
from .shell import ready as ready
from .shell import write_json as write_json
