"""What ``jaxtap new`` writes: a folder for each kind, and what all kinds have, in ``common``.

``@@name`` and the like are replaced in texts; ``module`` in paths is the distribution's package,
and ``dot_github`` is ``.github``. Files end with ``.in``, so that no tool reads them as its own.
"""
