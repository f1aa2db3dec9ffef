"""Makes docs/config.md from the configuration's own tree: `make docs`."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from offbook.core.config import Config

HEAD = """\
# Configuration

Made by `make docs` from src/offbook/core/config/. Files are composed left to right, then come overrides:
`offbook train @ pocket mine.toml --feedback.weight 0.3`. `--dry-run` prints the result. Defaults fit a model from the
hub; other models get the recipe that fits them (src/offbook/recipes/) unless you name one. An override that a verb does
not read is refused; a file may have keys of other verbs.
"""
NAMES = {str: "text", int: "int", float: "float", bool: "bool"}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def config_reference() -> str:
    return "\n".join([HEAD, *_section(Config, "")]) + "\n"


def _section(section: type[BaseModel], prefix: str) -> Iterator[str]:
    inner = {name: field.annotation for name, field in section.model_fields.items() if _is_section(field.annotation)}
    yield f"## {prefix.rstrip('.') or 'The top'}\n"
    if section.__doc__:
        yield f"{' '.join(section.__doc__.split())}\n"
    if inner.keys() != section.model_fields.keys():
        yield "| key | default | values | |\n|---|---|---|---|"
    for name, field in section.model_fields.items():
        if name not in inner:
            cells = (f"`{prefix}{name}`", _default(field), _values(field), field.description or "")
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""
    for name, kind in inner.items():
        yield from _section(kind, f"{prefix}{name}.")  # type: ignore[arg-type]


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "none: has to be given"
    return f"`{value}`" if value != "" else "empty"


def _values(field: FieldInfo) -> str:
    limits = [
        f"{word}{limit:g}"
        for bound in field.metadata
        for name, word in BOUNDS.items()
        if (limit := getattr(bound, name, None)) is not None
    ]
    return " ".join([_kind(field.annotation), *limits])


def _kind(kind: Any) -> str:
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin is Literal:
        return " ".join(
            "empty" if value == "" else f"`{str(value).lower() if isinstance(value, bool) else value}`"
            for value in arguments
        )
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin in (list, tuple):
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return f"table: {_kind(arguments[0])} to {_kind(arguments[1])}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_kind(argument) for argument in arguments)
    return NAMES[kind]


if __name__ == "__main__":
    print(config_reference(), end="")
