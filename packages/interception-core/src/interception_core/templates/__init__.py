"""Templates of ``jaxtap new``: a folder for each kind, and ``common``.

``@@name`` and the like are replaced in texts. In paths, ``module`` becomes the distribution's
package, and ``dot_github`` becomes ``.github``. Files end with ``.in``, so that no tool reads them.
"""
