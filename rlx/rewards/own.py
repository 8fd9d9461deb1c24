"""Verifiers of the user's own, by `package.module:function` or `path/to/file.py:function`. No JAX.

Such a function is called as `function(completion, row, **settings)` and returns a `Score`. Its
settings are its keyword-only parameters. Its attributes `many`, `check`, `bounded` and `imports`
count as those of any other verifier do.
"""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from model.errors import BadInput
from rlx.rewards.score import Score

EXAMPLE = "my_package.my_module:score or path/to/my_verifier.py:score"

MARKS = ("many", "check", "bounded", "imports")
"""Attributes of the function that are the verifier's too."""


def is_own(name: str) -> bool:
    return ":" in name


class OwnVerifier:
    """A function of the user's; it travels to other processes by its name and is loaded there.

    Raises BadInput where it can't be loaded, or can't be called as a verifier.
    """

    def __init__(self, name: str):
        source, _, function = name.rpartition(":")
        if not source or not function:
            raise BadInput(f"A verifier of your own is named like {EXAMPLE}; came {name!r}.")
        if source.endswith(".py"):
            # another process may stand in another folder
            source = str(Path(source).expanduser().resolve())
        self.name = function
        self.place = f"{source}:{function}"
        self.__signature__ = _signature(self.function, self.place)

    @property
    def function(self) -> Callable[..., Score]:
        return _loaded(self.place)

    def __call__(self, completion: str, row: Mapping, **settings: Any) -> Score:
        result = self.function(completion, row, **settings)
        if not isinstance(result, Score):
            raise TypeError(f"{self.place} must return a rlx.rewards.Score, not {result!r:.80}")
        return result

    def __reduce__(self) -> tuple:
        return OwnVerifier, (self.place,)

    def __getattr__(self, attribute: str) -> Any:
        if attribute in MARKS and "place" in self.__dict__:
            return getattr(self.function, attribute)
        raise AttributeError(attribute)


@functools.cache
def _loaded(place: str) -> Callable[..., Score]:
    source, _, name = place.rpartition(":")
    try:
        module = _module_of_file(Path(source)) if source.endswith(".py") else _module(source)
    except BadInput:
        raise
    except (Exception, SystemExit) as error:
        raise BadInput(
            f"{place}: {source} can't be loaded: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise BadInput(f"{place}: {source} has no function {name}; it has {_functions(module)}.")
    return function


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise  # something that the module needs is missing, not the module
        raise BadInput(
            f"{name}: there is no such module where Python looks (PYTHONPATH, or installed"
            f" packages); expected a name like {EXAMPLE}."
        ) from error


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise BadInput(f"There is no file {path} to take a verifier from.")
    # The path in the name: two files may be called alike.
    name = f"own_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    # Known before it runs: dataclasses, for one, look their module up.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _functions(module: ModuleType) -> str:
    own = (
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    )
    return ", ".join(own) or "none at all"


def _signature(function: Callable, place: str) -> inspect.Signature:
    try:
        signature = inspect.signature(function)
        signature.bind("", {}, **_required(signature))
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"{place} can't be called as a verifier, function(completion, row, *, settings):"
            f" {error}."
        ) from error
    return signature


def _required(signature: inspect.Signature) -> dict[str, None]:
    """Stand-ins for the settings, with which the call must be one."""
    return {
        name: None
        for name, parameter in signature.parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
