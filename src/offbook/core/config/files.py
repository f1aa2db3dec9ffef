"""From files and options to a configuration: a recipe that fits the model, TOML files left to right, then dotted
overrides. A key that does not exist is refused with the nearest one that does."""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError

from offbook.core.config.tree import Config, is_url
from offbook.types import OffbookError

RECIPES = Path(__file__).parents[2] / "recipes"
SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)b(?![a-z0-9])")  # billions of parameters in a hub id
BY_SIZE = ((0.3, "standard"), (1.0, "qwen3-0.6b"), (5.0, "qwen3-4b"), (math.inf, "qwen3-8b-lora"))


class ConfigError(OffbookError):
    exit_code = 2


def recipes() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def shipped_models() -> dict[str, dict[str, Any]]:
    """The config.json of common models, by hub id: only what their shapes follow from."""
    found: dict[str, dict[str, Any]] = json.loads((RECIPES / "models.json").read_text())
    return found


def recipe_for(model: str) -> str:
    """The name of the recipe that fits a model: that of its family, or of its size. Checkpoints of the pocket model say
    that they are, adapters go by their base."""
    bases = [base for adapter in _adapters(model) if (base := adapter.get("base_model_name_or_path"))]
    folders = [*_folders(model), *map(Path, bases)]
    described = [path.read_text() for folder in folders for path in folder.glob("config.json")]
    if model in ("pocket", "pocket-moe") or any("offbook_profile" in text for text in described):
        return "pocket"
    if is_url(model):
        return "remote"
    names = [name.lower() for name in (model, *bases) if not Path(name).exists()]
    if any("smollm2-135m" in name for name in names):
        return "small"
    sizes = [*map(_billions, described), *(float(size) for name in names for size in SIZE.findall(name))]
    return next(recipe for most, recipe in BY_SIZE if max(sizes, default=0.0) <= most)


def _billions(described: str) -> float:
    """About how many parameters a model has, by its config.json; 0 where it says too little."""
    try:
        shape = json.loads(described)
        inner = shape.get("moe_intermediate_size") or shape["intermediate_size"]
        layer = 4 * shape["hidden_size"] + 3 * inner * (shape.get("num_experts") or 1)
        return float(shape["hidden_size"] * (shape["num_hidden_layers"] * layer + shape["vocab_size"]) / 1e9)
    except (ValueError, KeyError, TypeError):
        return 0.0


def _folders(model: str) -> list[Path]:
    """Of a model, or of a run and its checkpoints, the newest last."""
    return [Path(model), *sorted(Path(model).glob("ckpt/step_*"))]


def _adapters(model: str) -> list[dict[str, Any]]:
    """What peft says of those in a model's folders."""
    found = []
    for path in (path for folder in _folders(model) for path in folder.glob("adapter_config.json")):
        try:
            found.append(json.loads(path.read_text()))
        except FileNotFoundError:  # a run that goes on has dropped this checkpoint
            continue
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    return found


def _asked_of_adapters(branches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    for branch in branches:
        train = branch.get("train")
        lora = train.get("lora") if isinstance(train, dict) else None
        asked |= lora if isinstance(lora, dict) else {}
    return asked


def _take_adapters(tree: dict[str, Any], in_files: dict[str, Any], in_options: dict[str, Any]) -> None:
    """Take `train.lora` from a model that is an adapter, and refuse another one in files or options. Recipes do not set
    it, nor does the file of a run in which all weights were trained."""
    adapters = [one for one in _adapters(str(tree.get("model", ""))) if one.get("peft_type") == "LORA"]
    if not adapters or not isinstance(tree.setdefault("train", {}), dict):
        return
    about = adapters[-1]
    own = {"rank": about.get("r", 8), "alpha": about.get("lora_alpha", 8)}  # peft's own defaults
    names = about.get("target_modules")
    own["targets"] = sorted(names) if isinstance(names, list) else []  # it may be an expression
    tree["train"]["lora"] = own
    differing = []
    for name, asked in {**(in_files if in_files.get("rank") else {}), **in_options}.items():
        wanted = sorted(asked) if isinstance(asked, list) else asked
        if name in own and wanted not in ([], own[name]):
            differing.append(f"train.lora.{name} is {wanted!r} and the adapter's {own[name]!r}")
    if differing:
        problem = f"{tree['model']} is an adapter, which is trained on as it is ({'; '.join(differing)})"
        raise ConfigError(f"{problem}; leave train.lora out, or merge it first (offbook export --merged)")


def load_config(
    files: Sequence[Path | str], overrides: Mapping[str, str], defaults: Mapping[str, str] | None = None
) -> Config:
    """Later files win over earlier ones, overrides over files, and all of them over the recipe that fits the model.

    A file may be one of recipes/ by its name, such as `pocket`; then that one is taken whatever the model is.
    `defaults`, of a verb, are what a file or an override does not say.
    """
    paths = [_recipe_or_file(str(file)) for file in files]
    are_ours = [path.resolve().parent == RECIPES.resolve() for path in paths]
    read, options = list(map(_read_toml, paths)), list(_branches(overrides))
    theirs = [branch for branch, is_ours in zip(read, are_ours, strict=True) if not is_ours]
    asked = _asked_of_adapters(theirs), _asked_of_adapters(options)
    given: dict[str, Any] = {}
    for branch in (*_branches(defaults or {}), *read, *options):
        _merge(given, branch)
    tree: dict[str, Any] = {}
    if not any(are_ours):
        _merge(tree, _read_toml(RECIPES / f"{recipe_for(str(given.get('model', '')))}.toml"))
    _merge(tree, given)
    _refuse_unknown(tree, Config, "")
    _take_adapters(tree, *asked)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":  # a sentence of our own
            raise ConfigError(str(first["ctx"]["error"])) from None
        where = ".".join(str(part) for part in first["loc"])
        problem = f"{where} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
        raise ConfigError(problem + _example(where)) from None


def _recipe_or_file(name: str) -> Path:
    return RECIPES / f"{name}.toml" if name in recipes() else Path(name)


def _branches(values: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Dotted keys as trees of one leaf each."""
    for key, text in values.items():
        *parents, name = key.split(".")
        branch: dict[str, Any] = {name: _parse_value(key, text)}
        for parent in reversed(parents):
            branch = {parent: branch}
        yield branch


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        known = "" if path.suffix else f"; recipes are {', '.join(recipes())}"
        raise ConfigError(f"cannot read {path}: {error.strerror}{known}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _parse_value(key: str, text: str) -> Any:
    """Overrides are written as in TOML; what is not a TOML value is taken as a bare string, of a list as `a,b`."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    if _is_list(key) and isinstance(value, str) and not value.startswith("["):  # that is a list with a mistake in it
        return [part for part in map(str.strip, value.split(",")) if part]
    return value


def _is_list(key: str) -> bool:
    kind: Any = Config
    for name in key.split("."):
        fields = getattr(kind, "model_fields", {})
        kind = fields[name].annotation if name in fields else None
    return get_origin(kind) is list


def _merge(into: dict[str, Any], new: dict[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _paths(section: type[BaseModel], prefix: str = "") -> list[str]:
    found = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        inner = isinstance(kind, type) and issubclass(kind, BaseModel)
        found += _paths(kind, f"{prefix}{name}.") if inner else [prefix + name]  # type: ignore[arg-type]
    return found


def _refuse_unknown(tree: dict[str, Any], section: type[BaseModel], prefix: str) -> None:
    for key, value in tree.items():
        field = section.model_fields.get(key)
        if field is None:
            while isinstance(value, dict) and value:  # an unknown section: name the first value given in it
                name, value = next(iter(value.items()))
                key = f"{key}.{name}"
            raise ConfigError(_unknown_key(prefix + key))
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(value, dict):
            _refuse_unknown(value, kind, f"{prefix}{key}.")


def _unknown_key(key: str) -> str:
    known = _paths(Config)
    same_leaf = [path for path in known if path.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    near = difflib.get_close_matches(key, same_leaf or known, n=1, cutoff=0.0 if same_leaf else 0.5)
    for path in near:
        return f"unknown configuration key {key}; did you mean {path}{_example(path)}?"
    return f"unknown configuration key {key}; `offbook train --model pocket --dry-run` prints all of them"


def _example(key: str) -> str:
    """How a key is given, with its default; empty for a section or an empty default."""
    value: Any = Config()
    for name in key.split("."):
        value = getattr(value, name, None)
    shown = str(value).lower() if isinstance(value, bool) else value
    return f", as in: --{key} {shown}" if isinstance(value, str | int | float) and value != "" else ""
