"""Progress with and without tqdm."""

import sys

from interception_core.log import progress


def test_progress_without_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(progress(iter([1, 2]), desc="steps")) == [1, 2]
    with progress(total=3, unit="B") as bar:
        bar.update(2)


def test_progress(capsys):
    from tqdm import tqdm

    assert isinstance(progress([1]), tqdm)
