"""Progress with and without tqdm, and what takes long."""

import io
import sys
import time

from interception_core import log
from interception_core.log import progress


def test_progress_without_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(progress(iter([1, 2]), desc="steps")) == [1, 2]
    with progress(total=3, unit="B") as bar:
        bar.update(2)


def test_progress(capsys):
    from tqdm import tqdm

    assert isinstance(progress([1]), tqdm)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_is_told_of_what_takes_long(monkeypatch):
    monkeypatch.setattr(log, "SECONDS", 0.01)
    for made, shown in ((Terminal, "planning\n"), (io.StringIO, "")):
        monkeypatch.setattr(sys, "stderr", made())
        with log.telling("planning"):
            time.sleep(0.2)
        with log.telling("what is done at once"):
            pass
        time.sleep(0.05)
        assert sys.stderr.getvalue() == shown
