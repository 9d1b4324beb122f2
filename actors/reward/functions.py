"""Reward functions: finding them by name, calling them for one sample, and checking what they return.

A reward function has the shape that TRL made common::

    def f(prompts: list[str], completions: list[str], **columns: list) -> list[float | None]

sync or async. It gets every data column as a keyword argument; one without ``**kwargs`` gets only what it names. We
call it with one sample at a time, so that each sample has a deadline and a fault of its own: the lists have length 1.

Children import this module, so it stays with the standard library.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import math
import reprlib
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.reward.verifiers import BUILTINS
from storage.errors import UserError

if TYPE_CHECKING:
    from asyncio import Runner

    from actors.reward.options import RewardOptions

START_DEADLINE_S = 60.0
"""Longest time for a child to import its functions, in seconds."""
_MAX_MESSAGE_CHARS = 600
_OURS = ("prompts", "completions")


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a function takes.

    Attributes:
        required: Names without a default. optional: names with one.
        any: Whether it has ``**kwargs``.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    any: bool

    def takes(self, name: str) -> bool:
        """Whether ``name`` may be passed as a keyword."""
        return self.any or name in self.required or name in self.optional


class ScoringError(Exception):
    """A reward function failed on a sample; the message names the function and what happened."""


class RewardFunction:
    """A loaded function with its configured arguments."""

    def __init__(self, spec: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self.spec = spec
        self.parameters = parameters_of(spec, function)
        self._function = function
        self._arguments = dict(arguments)
        self._runner: Runner | None = None

    def __call__(self, prompt: str, completion: str, columns: Mapping[str, Any]) -> float | None:
        """Score one sample; raises :class:`ScoringError` for anything but a finite number or ``None``."""
        try:
            keywords = self._keywords(prompt, completion, columns)
            returned = self._function(**keywords)
            if inspect.isawaitable(returned):
                returned = self._await(returned)
        except ScoringError:
            raise
        except BaseException as error:  # sys.exit and KeyboardInterrupt of user code included: they are faults too
            raise ScoringError(shorten(f"{self.spec}: {describe(error)}")) from error
        return self._checked(returned)

    def _keywords(self, prompt: str, completion: str, columns: Mapping[str, Any]) -> dict[str, Any]:
        takes = self.parameters.takes
        keywords = {name: [value] for name, value in columns.items() if takes(name)}
        keywords.update({"prompts": [prompt]} if takes("prompts") else {}, completions=[completion])
        keywords.update(self._arguments)
        for name in self.parameters.required:
            if name not in keywords:
                raise ScoringError(f"{self.spec}: the row has no column {name!r}, which the function needs")
        return keywords

    def _await(self, awaitable: Any) -> Any:
        if self._runner is None:
            import asyncio

            self._runner = asyncio.Runner()  # one loop for all samples: clients that functions keep stay usable

        async def result() -> Any:
            return await awaitable

        return self._runner.run(result())

    def _checked(self, returned: Any) -> float | None:
        expected = "expected a list with one number or None per completion (1 here)"
        if not isinstance(returned, (list, tuple)):
            raise ScoringError(f"{self.spec}: returned {_show(returned)}; {expected}")
        if len(returned) != 1:
            raise ScoringError(f"{self.spec}: returned {len(returned)} values, {_show(returned)}; {expected}")
        value = returned[0]
        if value is None:
            return None
        try:
            # 0-d arrays and tensors are not registered as Real, but do convert
            number = float(value) if isinstance(value, Real) or hasattr(value, "__float__") else None
        except Exception as error:
            raise ScoringError(f"{self.spec}: returned {_show(returned)} ({describe(error)}); {expected}") from error
        if number is None:
            raise ScoringError(f"{self.spec}: returned {_show(returned)}; {expected}")
        if not math.isfinite(number):
            raise ScoringError(f"{self.spec}: returned {number}; expected a finite number, or None to abstain")
        return number


def function_names(specs: Sequence[str]) -> list[str]:
    """Return a short, unique name for each function, under which its rewards are logged.

    The last part of the path; the whole path, then a running number, where that is taken.
    """
    names: list[str] = []
    for spec in specs:
        short = spec.replace(":", ".").rpartition(".")[2]
        numbered = (f"{spec}_{number}" for number in range(2, len(specs) + 2))
        names.append(next(name for name in (short, spec, *numbered) if name not in names))
    return names


def load_function(spec: str, arguments: Mapping[str, Any] | None = None) -> RewardFunction:
    """Import the function that ``spec`` names: a built-in, ``package.module.function`` or ``path/file.py:function``.

    This runs the module's code: call it in a child. Raises ``UserError`` when there is no such function or it cannot
    take completions.
    """
    builtin = BUILTINS.get(spec)
    if builtin is not None:
        if builtin.prepare is not None:
            builtin.prepare()
        return RewardFunction(spec, builtin.function, arguments or {})
    function = _from_file(spec) if ":" in spec else _from_module(spec)
    if not callable(function):
        raise UserError(f"reward function {spec}: this is a {type(function).__name__}, not a function")
    return RewardFunction(spec, function, arguments or {})


def parameters_of(spec: str, function: Callable[..., Any]) -> Parameters:
    """Return what ``function`` takes; raises ``UserError`` when it cannot be called as a reward function."""
    shape = "a reward function looks like f(prompts, completions, **columns)"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise UserError(f"reward function {spec}: its parameters cannot be read; {shape}") from None
    required: list[str] = []
    optional: list[str] = []
    any_keyword = False
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            any_keyword = True
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise UserError(f"reward function {spec}: parameter {name!r} cannot be given by name; {shape}")
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            (required if parameter.default is parameter.empty else optional).append(name)
    parameters = Parameters(tuple(required), tuple(optional), any_keyword)
    if not parameters.takes("completions"):
        raise UserError(f"reward function {spec}{signature}: it has no parameter 'completions'; {shape}")
    return parameters


def check_functions(
    options: RewardOptions, columns: Collection[str] | None = None, *, deadline_s: float = START_DEADLINE_S
) -> None:
    """Check that every configured function exists, can be imported and fits the data; nothing is scored.

    Your own modules are imported in a process that is killed after ``deadline_s`` seconds. ``columns`` are the names
    of the data set's columns; ``None`` leaves them unchecked. Raises ``UserError`` naming the function and what to do.
    """
    from actors.reward.process import describe_function  # it imports this module

    for entry in options.functions:
        spec = entry.function
        builtin = BUILTINS.get(spec)
        if builtin is None:
            parameters = describe_function(spec, entry.arguments, deadline_s, options.pass_environment)
        elif builtin.package and importlib.util.find_spec(builtin.package) is None:
            raise UserError(
                f"reward function {spec} needs the package {builtin.package.replace('_', '-')}; "
                f"pip install 'slipstream[{builtin.extra}]'"
            )
        else:
            parameters = parameters_of(spec, builtin.function)
        _check_fit(spec, parameters, entry.arguments, columns)


def _check_fit(spec: str, parameters: Parameters, arguments: Collection[str], columns: Collection[str] | None) -> None:
    known = (*parameters.required, *parameters.optional)
    for name in arguments:
        if name in _OURS:
            raise UserError(f"reward function {spec}: 'arguments' must not set {name!r}; it is filled in per sample")
        if not parameters.takes(name):
            raise UserError(f"reward function {spec} has no parameter {name!r}{nearest(name, known)}")
    if columns is None:
        return
    for name in parameters.required:
        if name not in (*_OURS, *arguments, *columns):
            raise UserError(
                f"reward function {spec} needs a column {name!r}, which the data lack{nearest(name, columns)} "
                f"(columns: {', '.join(sorted(columns)) or 'none'}); add the column, give the parameter a default, or "
                "set it under 'arguments'"
            )


def nearest(name: str, choices: Collection[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the choice closest to ``name``, or ``""``."""
    matches = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def describe(error: BaseException) -> str:
    """Return ``"ValueError: message (file.py line 3)"``, with the innermost line that is not the standard library's."""
    text = "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")
    if isinstance(error, SystemExit):
        text += f" (exit was called with {error.code!r})"
    library = str(Path(traceback.__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    own = [f for f in frames if not f.filename.startswith((library, "<"))] or frames
    return f"{text} ({Path(own[-1].filename).name} line {own[-1].lineno})" if own else text


def shorten(text: str) -> str:
    """Cut ``text`` to a length that is fit for logs and records."""
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[: _MAX_MESSAGE_CHARS - 4] + " ..."


def _show(value: Any) -> str:
    try:
        shown = reprlib.repr(value)
    except Exception:
        shown = "(unprintable)"
    return f"{type(value).__name__} {shown}"


def _from_module(spec: str) -> Any:
    parts = spec.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise UserError(
            f"reward function {spec!r} is neither built in ({', '.join(BUILTINS)}) nor of the form "
            f"package.module.function or path/file.py:function{nearest(spec, BUILTINS)}"
        )
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            # only a missing part of the path itself may be an attribute instead; a missing dependency is reported
            if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
                continue
            raise UserError(f"reward function {spec}: importing {module_name} failed: {describe(error)}") from error
        except BaseException as error:
            raise UserError(f"reward function {spec}: importing {module_name} failed: {describe(error)}") from error
        return _attribute(spec, module, module_name, parts[cut:])
    raise UserError(
        f"reward function {spec}: there is no module {parts[0]!r} in the current directory, PYTHONPATH or the "
        "installed packages; start from the directory that holds it, or write path/file.py:function"
    )


def _from_file(spec: str) -> Any:
    name, _, attribute = spec.rpartition(":")
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"reward function {spec}: there is no file {path.absolute()}")
    if not attribute:
        raise UserError(f"reward function {spec}: the function's name is missing behind the colon")
    module_spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(f"reward function {spec}: {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and others look their module up
    sys.path.append(str(path.absolute().parent))  # so that the file can import its neighbours
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:
        raise UserError(f"reward function {spec}: importing {path} failed: {describe(error)}") from error
    return _attribute(spec, module, str(path), attribute.split("."))


def _attribute(spec: str, found: Any, place: str, names: Sequence[str]) -> Any:
    for name in names:
        if not hasattr(found, name):
            public = [n for n in dir(found) if not n.startswith("_")]
            raise UserError(f"reward function {spec}: {place} has no {name!r}{nearest(name, public)}")
        found, place = getattr(found, name), f"{place}.{name}"
    return found
