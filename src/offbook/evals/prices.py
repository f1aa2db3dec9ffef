"""Token prices from a TOML file: a table per model, `[name] input = 2.0, output = 10.0`, per million tokens."""

from __future__ import annotations

import tomllib
from pathlib import Path

from offbook.types import OffbookError, Prices

ANY = "default"


def read_prices(path: Path, model: str) -> Prices:
    """The model's own table, or `default`."""
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise OffbookError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OffbookError(f"{path} is not valid TOML: {error}") from None
    table = tables.get(model, tables.get(ANY))
    if table is None:
        raise OffbookError(
            f"{path} has no prices of {model} and no table [{ANY}]; it has {', '.join(tables) or 'none'}"
        )
    numbers = [table.get(key) if isinstance(table, dict) else None for key in ("input", "output")]
    if not all(isinstance(number, int | float) and number >= 0 for number in numbers):
        raise OffbookError(f"the prices of {model} in {path} must be two numbers, input and output, not negative")
    return Prices(*map(float, numbers))  # type: ignore[arg-type]
