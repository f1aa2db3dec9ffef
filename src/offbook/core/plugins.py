"""A user's own functions, from the Python files that a configuration names: `rewards.files`, `tools.files`,
`feedback.files`."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from offbook.types import OffbookError


def functions_in(path: Path, setting: str, kind: str, taken: Collection[str]) -> dict[str, Callable[..., Any]]:
    """The public functions that a file defines, none under a name that is `taken`; `setting` names the file, and they
    are of a `kind`: tools. The file is run as it is, with the rights of the user who runs offbook."""
    if not path.is_file():
        raise OffbookError(f"there is no file {path} with {kind}; {setting} are paths from the current folder")
    name = f"own_{kind}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise OffbookError(f"{path} in {setting} is not a Python file; {kind} are plain functions in a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the border to a user's code
        raise OffbookError(f"{path} cannot be loaded: {said(error)}") from error
    found: dict[str, Callable[..., Any]] = {
        public: thing
        for public, thing in vars(module).items()
        if inspect.isfunction(thing) and thing.__module__ == name and not public.startswith("_")
    }
    if again := next((public for public in found if public in taken), ""):
        raise OffbookError(f"there are two {kind} called {again}; give the one in {path} another name")
    return found


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
