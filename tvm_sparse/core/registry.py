"""Which operators there are, and where each of them lives.

An operator has two fixed addresses, a package of its own under `operators/` and one under `schedules/`, and one line in
`BUILTIN`. Everything else finds it here by name, and imports only the module it needs:

================  ==================================================================  ==================================
module            holds                                                               is asked by
================  ==================================================================  ==================================
``problem``       ``PROBLEM``, the class that declares it                             everybody
``call``          the public functions and classes that `Operator.public` names;      `import tvm_sparse`, `explain`
                  ``told_way`` to say which way calls take, if there are several
``peers``         ``PEERS``, and ``ours`` to call the public function with inputs;    `bench`, `quickstart`
                  ``ways`` to call it by each of them, if it has several
``shapes``        ``QUICKSTART``, ``AWKWARD`` and ``REALISTIC`` problem keys          `quickstart`, the generic tests
``torch_op``      custom operators of PyTorch for public functions; optional          `runtime.custom`
the schedules     ``TEMPLATES``, and ``FALLBACKS`` by kind of machine                 tuning, look-up, export
================  ==================================================================  ==================================

``QUICKSTART`` is tuned by `tvm-sparse quickstart`, and may be empty. ``AWKWARD`` are small, irregular shapes on which
generic tests run every template. ``REALISTIC`` are shapes in use, for limits that only show there: registers and shared
memory.

Operators of other packages are found by the entry point group ``tvm_sparse.operators``, or by `add_plugin` (on the
command line ``--plugin``) with the path of a folder or file that holds an `Operator` named ``OPERATOR``. A plugin may
also bring templates for existing operators, as ``TEMPLATES``. Child processes load the plugins of their parent.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .problem import Problem, ProblemError, fields

if TYPE_CHECKING:
    from .template import Template

ENTRY_POINTS = "tvm_sparse.operators"


class PluginError(RuntimeError):
    """A plugin without an operator, or with a name that is taken; the message says which and what is expected."""


@dataclass(frozen=True)
class Operator:
    """One operator: its name, its two packages, and the public names that it brings.

    Attributes
    ----------
    name
        As in keys and on the command line.
    home, schedules
        Names of the packages; see the module's docstring for what they hold.
    public
        Functions and classes of its `call` module that the package shows as its own.
    """

    name: str
    home: str = ""
    schedules: str = ""
    public: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.home:
            object.__setattr__(self, "home", f"tvm_sparse.operators.{self.name}")
        if not self.schedules:
            object.__setattr__(self, "schedules", f"tvm_sparse.schedules.{self.name}")

    def _module(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self.home}.{name}")

    @property
    def problem(self) -> type[Problem]:
        return self._module("problem").PROBLEM

    @property
    def call(self) -> ModuleType:
        return self._module("call")

    @property
    def peers(self) -> ModuleType:
        return self._module("peers")

    @property
    def torch_op(self) -> ModuleType:
        return self._module("torch_op")

    @property
    def shapes(self) -> ModuleType:
        return self._module("shapes")

    @property
    def templates(self) -> tuple[Template, ...]:
        """Its own, and those that plugins have brought for it."""
        added = (template for template in _TEMPLATES if template.operator == self.name)
        return (*importlib.import_module(self.schedules).TEMPLATES, *added)

    @property
    def fallbacks(self) -> Mapping[str, tuple[Template, ...]]:
        """The templates that run without tuning, by kind of machine: the first one that fits the problem is used.

        That template also takes part in every tuning run. The last one of a kind fits every shape.
        """
        return importlib.import_module(self.schedules).FALLBACKS


BUILTIN = (
    Operator("softmax_topk", public=("softmax_topk",)),
    Operator("softmax_sample", public=("softmax_sample",)),
    Operator("edit_logits", public=("edit_logits",)),
    Operator("bsr_matmul", public=("bsr_matmul", "BsrWeight")),
    Operator("nhot_lookup", public=("nhot_lookup", "CsrRows", "EmbeddingTables")),
    Operator("csr_linear", public=("csr_linear",)),
    Operator("softmax", public=("softmax", "log_softmax")),
    Operator("logsumexp", public=("logsumexp",)),
    Operator("wta_hash", public=("wta_hash",)),
    Operator("lsh_lookup", public=("lsh_lookup",)),
    Operator("compaction", public=("compaction",)),
    Operator("lsh_candidates", public=("lsh_candidates",)),
    Operator("lsh_topk", public=("lsh_topk",)),
    Operator("head_topk", public=("head_topk",)),
    Operator("head_draw"),
    Operator("candidate_topk", public=("candidate_topk",)),
    Operator("candidate_logits", public=("candidate_logits",)),
    Operator("sparse_recurrent", public=("sparse_recurrent", "recurrent_weights", "RecurrentWeights")),
    Operator("block_recurrent", public=("block_recurrent", "block_recurrent_weights", "BlockRecurrentWeights")),
    Operator("recurrent_backward"),
    Operator("bsr_sddmm"),
    Operator("screen"),
)

# Operators that a kind of program calls together: what `--set` names.
SETS: Mapping[str, tuple[str, ...]] = {
    "serve": (
        *("softmax_topk", "softmax_sample", "edit_logits", "softmax", "logsumexp"),
        *("head_topk", "head_draw", "candidate_topk", "candidate_logits", "screen"),
        *("wta_hash", "lsh_lookup", "compaction", "lsh_candidates", "lsh_topk"),
    ),
    "sparse": ("bsr_matmul", "bsr_sddmm", "csr_linear", "nhot_lookup"),
    "recurrent": ("sparse_recurrent", "block_recurrent", "recurrent_backward"),
}


@functools.cache
def _registered() -> dict[str, Operator]:
    """The operators of the package and of installed plugins; `add` adds to it."""
    found = {operator.name: operator for operator in BUILTIN}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            operator = entry.load()
        except Exception as error:  # somebody else's module may raise anything
            raise PluginError(f"entry point {entry.name}: {entry.value} does not import: {_said(error)}") from error
        if not isinstance(operator, Operator) or operator.name in found:
            raise PluginError(f"entry point {entry.name}: expected an Operator of a name not taken, got {operator!r}")
        found[operator.name] = operator
    return found


# Paths of plugins in the order of their addition, which child processes repeat.
_PLUGINS: list[str] = []
# Templates that plugins brought for operators that are not theirs.
_TEMPLATES: list[Template] = []


def operators() -> Mapping[str, Operator]:
    """The operators by name, in the order in which they are listed."""
    return _registered()


def add(operator: Operator) -> None:
    """Register an operator for this process.

    Raises
    ------
    PluginError
        If another one has this name.
    """
    known = _registered().setdefault(operator.name, operator)
    if known != operator:
        raise PluginError(f"operator {operator.name}: the name is taken by {known.home}")


def add_plugin(path: str | Path) -> Operator | None:
    """Register what a package folder or a Python file that lies outside of this package brings.

    The module is imported by its own name, from the folder that holds it. It defines ``OPERATOR``, an `Operator`, or
    ``TEMPLATES``, a sequence of templates for operators that are registered; or both. Adding it again changes nothing.
    Returns its operator, if it brings one.

    Raises
    ------
    PluginError
        If there is no such module, it or its schedules do not import, it defines neither, the name of the operator or
        of one of the templates is taken, or a template is for no operator that there is.
    """
    place = Path(path).resolve()
    name = place.stem if place.suffix == ".py" else place.name
    if str(place) in _PLUGINS:
        return getattr(sys.modules[name], "OPERATOR", None)
    if not place.exists():
        raise PluginError(f"plugin: {place} does not exist")
    # Last: a folder full of modules must not hide what is installed.
    if str(place.parent) not in sys.path:
        sys.path.append(str(place.parent))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
        operator = getattr(module, "OPERATOR", None)
        own = operator.templates if isinstance(operator, Operator) else ()
    except Exception as error:  # somebody else's module may raise anything
        raise PluginError(f"plugin: {place} does not import: {_said(error)}") from error
    found = Path(module.__file__ or "").resolve()
    if found not in (place, place / "__init__.py"):
        raise PluginError(f"plugin: {place}: another module is imported as {name}: {found}; rename the plugin")
    # A plugin's operator may have its schedules in the same module: then `TEMPLATES` are those.
    given = () if isinstance(operator, Operator) and operator.schedules == name else getattr(module, "TEMPLATES", ())
    _require_plugin(place, operator, own, given)
    if operator is not None:
        add(operator)
    _TEMPLATES.extend(given)
    _PLUGINS.append(str(place))
    return operator


def _require_plugin(place: Path, operator: object, own: Sequence[Template], given: Sequence[Template]) -> None:
    """Raise unless a plugin defines something, under names that are not taken."""
    from .template import Template

    if not isinstance(operator, Operator) and (operator is not None or not given):
        raise PluginError(
            f"plugin: {place} defines no OPERATOR of type tvm_sparse.core.registry.Operator, and no TEMPLATES"
        )
    for template in given:
        if not isinstance(template, Template):
            raise PluginError(f"plugin: {place}: TEMPLATES holds {template!r}, which is no template")
        if template.operator not in operators():
            raise PluginError(
                f"plugin: {place}: the template {template.name} is for {template.operator!r}, which is no"
                f" operator; {nearest(template.operator, operators())}"
            )
    names = {template.name for template in (*own, *given)}
    for other in operators().values():
        if operator != other and (taken := names & {template.name for template in other.templates}):
            raise PluginError(f"plugin: {place}: the template {min(taken)} has the name of one of {other.name}'s")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def add_plugins(paths: Iterable[str | Path]) -> None:
    """Add plugins by their paths, as `plugins` lists them in the parent process or the command line names them."""
    for path in paths:
        add_plugin(path)


def plugins() -> tuple[str, ...]:
    """Paths of the plugins that this process has added, for its child processes."""
    return tuple(_PLUGINS)


def find(name: str) -> Operator:
    """The operator of this name.

    Raises
    ------
    ProblemError
        If there is none, with the nearest names.
    """
    known = operators()
    if name not in known:
        raise ProblemError(f"operator: got {name!r}; {nearest(name, known)}")
    return known[name]


def problem_types() -> dict[str, type[Problem]]:
    """The class that declares each operator, by name."""
    return {name: operator.problem for name, operator in operators().items()}


# The largest extent of an axis: no array has more elements, and larger numbers in a record would break arithmetic.
_LARGEST = 1 << 48


def make(operator: str, axes: Mapping[str, Any]) -> Problem:
    """The problem of `operator` with these axes; numbers may be given as text.

    Arguments of a call may stand in the place of axes that follow from them, if the operator knows them
    (`Problem.of_call`): `top_k=50`, `seed=array`.

    Raises
    ------
    ProblemError
        For an unknown operator or axis (with the nearest valid names), a missing axis, or a value out of range.
    """
    cls = find(operator).problem
    axis = {field.name: field for field in fields(cls)}
    for name in axes:
        if name not in axis and name not in cls.call_words:
            raise ProblemError(f"{operator}: unknown axis {name!r}; {nearest(name, (*axis, *cls.call_words))}")
    axes = cls.of_call(axes)
    missing = [name for name, field in axis.items() if field.default is dataclasses.MISSING and name not in axes]
    if missing:
        raise ProblemError(f"{operator}: missing axis {', '.join(missing)}; expected {', '.join(axis)}")
    values = {name: _convert(operator, axis[name], value) for name, value in axes.items()}
    for name, value in values.items():
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise ProblemError(f"{operator}: {name} must be below 2^48, got a number of {value.bit_length()} bits")
    return cls(**values)


def parse(key: str) -> Problem:
    """The problem of a text key, as `Problem.key` writes it."""
    operator, _, text = key.partition("/")
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    bad = [name for name, equals, _ in pairs if not equals]
    if bad:
        raise ProblemError(f"problem key: expected axis=value, got {bad[0]!r} in {key!r}")
    return make(operator, {name: value for name, _, value in pairs})


def axis_type(field: dataclasses.Field) -> str:
    """The name of an axis's type: annotations are text under `from __future__ import annotations`, else types."""
    return field.type if isinstance(field.type, str) else field.type.__name__


def _convert(operator: str, field: dataclasses.Field, value: Any) -> Any:
    kind = {"int": int, "float": float}.get(axis_type(field))
    if kind is None or not isinstance(value, str):
        return value
    try:
        return kind(value.replace("_", ""))
    except ValueError:
        raise ProblemError(f"{operator}: {field.name} must be {axis_type(field)}, got {value!r}") from None


def nearest(name: str, valid: Iterable[str]) -> str:
    """For a message about an unknown name: the nearest valid names, else all of them."""
    valid = list(valid)
    close = difflib.get_close_matches(name, valid, n=2, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(valid)}"
