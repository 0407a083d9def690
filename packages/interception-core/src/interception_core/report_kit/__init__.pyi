"""The public names, and the modules that they are from."""

from .bars import FIRST as FIRST
from .bars import SECOND as SECOND
from .bars import WARN as WARN
from .bars import Bar as Bar
from .bars import Row as Row
from .bars import chart as chart
from .bars import shorten as shorten
from .bars import shorten_all as shorten_all
from .numbers import show_bytes as show_bytes
from .numbers import show_share as show_share
from .numbers import show_sqnr as show_sqnr
from .page import SHOWN as SHOWN
from .page import Column as Column
from .page import charts as charts
from .page import render as render
