"""Specs: what a plugin declares, without importing it.

Each class has a `kind` and a `key`. Two plugins must not claim the same key of a kind.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeGuard

from ..errors import PluginError
from .paths import PATH_FORM, is_path


def _matches(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


_NAME = (
    _matches(r"[a-z0-9][a-z0-9._-]*"),
    "a name of lower-case letters, digits, '-', '_' and '.', such as 'acme'",
)
_LINE = (_matches(r".*\S.*"), "one line of text")

# Fields of one name have one form in all specs. The fields that are not listed are paths.
_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": _NAME,
    "platform": _NAME,
    "op": _NAME,
    "target": (
        _matches(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+"),
        "a dotted name that starts with its package, such as 'acme.gemm'",
    ),
    "priority": (lambda value: isinstance(value, int) and not isinstance(value, bool), "an int"),
    "summary": _LINE,
    "install": _LINE,
}
_PATH = (is_path, f"a {PATH_FORM} string")
_OPTIONAL: dict[object, str] = {None: " or None", "": ", or empty"}


def is_version(value: object) -> TypeGuard[tuple[int, int]]:
    """Return whether a value is a version: (major, minor)."""
    return isinstance(value, tuple) and len(value) == 2 and all(type(part) is int for part in value)


def _refuse(spec: object, field: str, wanted: str) -> PluginError:
    given = getattr(spec, field)
    return PluginError(f"{type(spec).__name__}.{field} must be {wanted}, got {given!r}.")


@dataclass(frozen=True, slots=True)
class Spec:
    """What a plugin declares. The base class of all specs.

    Raises:
        PluginError: a field has the wrong type or form.
    """

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            has_form, form = _FORMS.get(field.name, _PATH)
            optional = _OPTIONAL.get(field.default, "")
            if not has_form(value) and not (optional and value == field.default):
                raise _refuse(self, field.name, form + optional)

    @property
    def key(self) -> str:
        """What only one plugin may declare of this kind."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _NamedSpec(Spec):
    name: str
    summary: str

    @property
    def key(self) -> str:
        """The name, unique among specs of the kind."""
        return self.name


@dataclass(frozen=True, slots=True)
class _FactorySpec(_NamedSpec):
    factory: str


@dataclass(frozen=True, slots=True)
class ProviderSpec(_FactorySpec):
    """Declare a provider, which `get_provider(name, **config)` builds.

    Args:
        name: what users ask for, such as ``"acme"``.
        summary: one line about it.
        factory: ``"module:attribute"`` of a callable that takes the config
            as keyword arguments and returns a provider: an object with
            `engine`, `disable_jit`, `interceptor()` and `apply(fn)`.
    """

    kind: ClassVar[str] = "provider"


@dataclass(frozen=True, slots=True)
class EngineSpec(_FactorySpec):
    """Declare an engine, which `get_engine(name, **config)` builds.

    Args:
        name: what users ask for, such as ``"patch"``.
        summary: one line about it.
        factory: as of a `ProviderSpec`. It returns an object with `wrap(fn, interceptor)`.
        priority: `get_engine()` without a name returns the engine with the highest one. jaxtap's
            engines have 10 and 20. An engine with 0 is used only if it is asked for by name.
    """

    kind: ClassVar[str] = "engine"
    priority: int = 0


@dataclass(frozen=True, slots=True)
class KernelSpec(Spec):
    """Declare a kernel: an XLA FFI target for an op.

    Args:
        target: the FFI target. It starts with its package, so that targets of
            different plugins differ: ``"acme_quant.gemm_ternary"``.
        platform: the platform as JAX spells it in lowering: ``"cpu"``, ``"cuda"``, ...
        handlers: ``"module:attribute"`` of a callable without arguments that
            returns a mapping of target names to `FfiTarget` objects. The one
            of `target` is registered when the kernel is first used.
        op: the op that the kernel implements, such as ``"gemm_w8a8"``. All
            kernels of an op take the same operands and attributes.
        supports: ``"module:attribute"`` of a predicate. It gets a
            `KernelCall`, and returns True, or False or a str that tells why the
            kernel can't take the call. None: the kernel takes every call.
        priority: of the kernels that support a call, the one with the highest
            priority is taken.
        summary: one line about it, or empty.
        apply: ``"module:attribute"`` of the function that programs call for
            the op, which `get_op` returns; None if another kernel declares it.
        workspace: ``"module:attribute"`` of a function that gets a `KernelCall`,
            as the target is called, and the results as a tuple of `Aval`. It
            returns how many bytes of scratch memory the target needs, which
            the target gets as one more result (uint8, the last), or None for
            no such result. None: the target never has such a result.
        bench: ``"module:attribute"`` of a function that gets this spec and
            returns a `Bench`: the calls that ``jaxtap bench`` times and
            ``jaxtap ops`` describes; or None.
    """

    kind: ClassVar[str] = "kernel"
    target: str
    platform: str
    handlers: str
    op: str
    supports: str | None = None
    priority: int = 0
    summary: str = ""
    apply: str | None = None
    workspace: str | None = None
    bench: str | None = None

    @property
    def key(self) -> str:
        """The target on its platform, unique among kernels."""
        return f"{self.target}@{self.platform}"


@dataclass(frozen=True, slots=True)
class BridgeSpec(_FactorySpec):
    """Declare a bridge: how the model objects of a framework are quantized.

    Args:
        name: the name of the framework, such as ``"nnx"``.
        summary: one line about it.
        factory: ``"module:attribute"`` of a callable without arguments that
            returns the bridge: an object with `parameters(model)`,
            `function(model, method)` and `rebuild(model, parameters, quantized)`.
        model: ``"package:Class"``, the base class of the framework's models.
            Nothing is imported to recognize a model: one of its classes has
            that name, in that package or below.
        install: what to install for it, such as ``"provider-xla[nnx]"``, for
            messages; or empty.
    """

    kind: ClassVar[str] = "bridge"
    model: str
    install: str = ""

    def is_for(self, cls: type) -> bool:
        """Return whether a class is the base class of the models."""
        package, _, name = self.model.partition(":")
        return cls.__qualname__ == name and f"{cls.__module__}.".startswith(f"{package}.")


@dataclass(frozen=True, slots=True)
class QTypeSpec(_FactorySpec):
    """Declare a number format that arrays can be quantized to.

    Its fields are those of a `ProviderSpec`. The name is what users write for a qtype, such as
    ``"nf3"``. The factory takes no arguments and returns a `quant_numerics.QType` of that name.
    """

    kind: ClassVar[str] = "qtype"


@dataclass(frozen=True, slots=True)
class FormSpec(_NamedSpec):
    """Declare a stored form: what plans and files hold for a float array.

    Args:
        name: the kind that files have for it, the same as that of the class.
        summary: one line about it.
        form: ``"module:Class"``, a subclass of `quant_numerics.StoredForm`.
    """

    kind: ClassVar[str] = "stored form"
    form: str


@dataclass(frozen=True, slots=True)
class FeatureSpec(_NamedSpec):
    """Declare a feature: what a method of another package's objects does.

    Args:
        name: what that method asks for, such as ``"plan-optimize"``.
        summary: one line about it.
        run: ``"module:attribute"`` of a function, which gets the object first.
    """

    kind: ClassVar[str] = "feature"
    run: str


@dataclass(frozen=True, slots=True)
class ExportBackendSpec(_FactorySpec):
    """Declare what quantizes an exported float file, which `get_export_backend` builds.

    Its fields are those of a `ProviderSpec`. The factory returns an object with `name`,
    `check(rules)` and `quantize(file)`, as `provider_odml_export.ExportBackend` says.
    """

    kind: ClassVar[str] = "export backend"


@dataclass(frozen=True, slots=True)
class CommandSpec(_NamedSpec):
    """Declare a command of the `jaxtap` command line.

    Args:
        name: the word after ``jaxtap``.
        summary: one line for ``jaxtap --help``.
        run: ``"module:attribute"`` of the command. It is called with the parsed
            `argparse.Namespace`, and returns the exit status, an int or None for 0.
        configure: ``"module:attribute"`` of a callable that gets the command's
            `argparse.ArgumentParser` and adds its options, or None. It is
            imported only for this command and its help.
    """

    kind: ClassVar[str] = "command"
    run: str
    configure: str | None = None


@dataclass(frozen=True, slots=True)
class DoctorCheck(_NamedSpec):
    """Declare a check that ``jaxtap doctor`` makes.

    Args:
        name: a short name for the list.
        summary: one line: what is checked.
        run: ``"module:attribute"`` of a callable without arguments that
            returns an iterable of `CheckResult`. It may import JAX.
    """

    kind: ClassVar[str] = "check"
    run: str


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One finding of a `DoctorCheck`.

    Args:
        status: ``"ok"``, ``"warn"`` or ``"fail"``. One ``"fail"`` makes
            ``jaxtap doctor`` exit with 1.
        message: the finding.
        hint: what to do, or empty.

    Raises:
        PluginError: a field has the wrong type or value.
    """

    status: str
    message: str
    hint: str = ""

    def __post_init__(self) -> None:
        if self.status not in ("ok", "warn", "fail"):
            raise _refuse(self, "status", "'ok', 'warn' or 'fail'")
        for field in ("message", "hint"):
            if not isinstance(getattr(self, field), str):
                raise _refuse(self, field, "a str")
