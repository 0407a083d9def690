"""Private JAX, by subject: the only place that depends on JAX's version.

All names were checked on 0.10.2, 0.11.2 and 0.12.0.1. A comment at an import says which versions
have it; names without a version are equal on all. The package reads each name that a subject
defines here, as ``compat.name``, so that it need not know the subject. Names with an underscore are
the subject's own. No two subjects define the same name, which tests check.
"""

from .ahead import *
from .deferred import *
from .emit import *
from .hijax import *
from .jaxpr import *
from .pjit import *
from .refs import *
from .trace import *
from .traced_prims import *
