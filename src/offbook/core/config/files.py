"""From files and options to a configuration: a recipe that fits the model, TOML files left to right, then dotted
overrides. A key that does not exist is refused with the nearest one that does, and so is an option that a verb
would ignore (verbs.toml)."""

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError

from offbook.core.config.tree import Config, is_url
from offbook.types import Json, OffbookError

RECIPES = Path(__file__).parents[2] / "recipes"
SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)b(?![a-z0-9])")  # billions of parameters in a hub id
BY_SIZE = ((0.3, "standard"), (1.0, "qwen3-0.6b"), (5.0, "qwen3-4b"), (math.inf, "qwen3-8b-lora"))


class ConfigError(OffbookError):
    exit_code = 2


def recipes() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def shipped_models() -> dict[str, Json]:
    """The config.json of common models, by hub id: only what their shapes follow from."""
    return json.loads((RECIPES / "models.json").read_text())


def recipe_for(model: str) -> str:
    """The name of the recipe that fits a model: that of its family, or of its size. Checkpoints of the pocket model say
    that they are, adapters go by their base."""
    names = [model, *(str(one.get("base_model_name_or_path")) for one in _described(model, "adapter_config.json"))]
    described = [one for name in names for one in _described(name, "config.json")]
    if model in ("pocket", "pocket-moe") or any("offbook_profile" in one for one in described):
        return "pocket"
    if is_url(model):
        return "remote"
    hub_ids = [name.lower() for name in names if not Path(name).exists()]
    if any("smollm2-135m" in name for name in hub_ids):
        return "small"
    sizes = [*map(_billions, described), *(float(size) for name in hub_ids for size in SIZE.findall(name))]
    return next(recipe for most, recipe in BY_SIZE if max(sizes, default=0.0) <= most)


def _billions(shape: Json) -> float:
    """About how many parameters a model has, by its config.json; 0 where it says too little."""
    try:
        inner = shape.get("moe_intermediate_size") or shape["intermediate_size"]
        layer = 4 * shape["hidden_size"] + 3 * inner * (shape.get("num_experts") or 1)
        return float(shape["hidden_size"] * (shape["num_hidden_layers"] * layer + shape["vocab_size"]) / 1e9)
    except (KeyError, TypeError):
        return 0.0


def _described(model: str, name: str) -> list[Json]:
    """JSON files of a name in a model's folder, or in a run's checkpoints, the newest last."""
    found = []
    for folder in [Path(model), *sorted(Path(model).glob("ckpt/step_*"))]:
        try:
            found.append(json.loads((folder / name).read_text()))
        except (FileNotFoundError, NotADirectoryError):  # a run that goes on may have dropped this checkpoint
            continue
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder / name} cannot be read: {str(error).splitlines()[0]}") from None
    return found


def _take_adapter(tree: Json, asked: Any) -> None:
    """Take `train.lora` from a model that is an adapter: it is trained on as it is. `asked` is the rank in options."""
    described = _described(str(tree.get("model", "")), "adapter_config.json")
    adapters = [one for one in described if one.get("peft_type") == "LORA"]
    if not adapters or not isinstance(tree.setdefault("train", {}), dict):
        return
    rank = adapters[-1].get("r", 8)
    if str(asked) not in ("None", str(rank)):
        problem = f"{tree['model']} is an adapter of rank {rank}, not {asked}"
        raise ConfigError(f"{problem}; leave train.lora out, or merge it first (offbook export --merged)")
    names = adapters[-1].get("target_modules")
    targets = sorted(names) if isinstance(names, list) else []  # it may be an expression
    tree["train"]["lora"] = {"rank": rank, "alpha": adapters[-1].get("lora_alpha", 8), "targets": targets}


def load_config(
    files: Sequence[Path | str], overrides: Mapping[str, Any], defaults: Mapping[str, str] | None = None
) -> Config:
    """Later files win over earlier ones, overrides over files, and all of them over the recipe that fits the model.

    A file may be one of recipes/ by its name, such as `pocket`; then that one is taken whatever the model is.
    `defaults`, of a verb, are what a file or an override does not say.
    """
    ours = recipes()
    paths = [RECIPES / f"{file}.toml" if str(file) in ours else Path(file) for file in files]
    given: Json = {}
    for branch in (*_branches(defaults or {}), *map(_read_toml, paths), *_branches(overrides)):
        _merge(given, branch)
    tree: Json = {}
    if not any(path.resolve().parent == RECIPES.resolve() for path in paths):
        _merge(tree, _read_toml(RECIPES / f"{recipe_for(str(given.get('model', '')))}.toml"))
    _merge(tree, given)
    _take_adapter(tree, overrides.get("train.lora.rank"))
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        found = error.errors()
        first = next((one for one in found if one["type"] == "extra_forbidden"), found[0])
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            value = first["input"]
            while isinstance(value, dict) and value:  # an unknown section: name the first value given in it
                name, value = next(iter(value.items()))
                where = f"{where}.{name}"
            raise ConfigError(_unknown_key(where)) from None
        if first["type"] == "value_error":  # a sentence of our own
            raise ConfigError(str(first["ctx"]["error"])) from None
        problem = f"{where} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
        raise ConfigError(problem + _example(where)) from None


def _branches(values: Mapping[str, Any]) -> Iterator[Json]:
    """Dotted keys as trees of one leaf each."""
    for key, text in values.items():
        branch = _parse_value(key, text)
        for name in reversed(key.split(".")):
            branch = {name: branch}
        yield branch


def _read_toml(path: Path) -> Json:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        known = "" if path.suffix else f"; recipes are {', '.join(recipes())}"
        raise ConfigError(f"cannot read {path}: {error.strerror}{known}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _parse_value(key: str, text: Any) -> Any:
    """Overrides are written as in TOML; what is not a TOML value is taken as a bare string, of a list as `a,b`."""
    if not isinstance(text, str):  # from Python
        return text
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    kind: Any = Config
    for name in key.split("."):
        fields = getattr(kind, "model_fields", {})
        kind = fields[name].annotation if name in fields else None
    if kind is str and not isinstance(value, str):  # a folder called `true` or `3`
        return text
    if get_origin(kind) is list and isinstance(value, str) and not value.startswith("["):  # that is a mistake in a list
        return [part for part in map(str.strip, value.split(",")) if part]
    return value


def _merge(into: Json, new: Json) -> None:
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


def _unknown_key(key: str) -> str:
    known = _paths(Config)
    same_leaf = [path for path in known if path.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    near = difflib.get_close_matches(key, same_leaf or known, n=1, cutoff=0.0 if same_leaf else 0.5)
    if near:
        return f"unknown configuration key {key}; did you mean {near[0]}{_example(near[0])}?"
    return f"unknown configuration key {key}; `offbook train --model pocket --dry-run` prints all of them"


def _example(key: str) -> str:
    """How a key is given, with its default; empty for a section or an empty default."""
    value: Any = Config()
    for name in key.split("."):
        value = getattr(value, name, None)
    shown = str(value).lower() if isinstance(value, bool) else value
    return f", as in: --{key} {shown}" if isinstance(value, str | int | float) and value != "" else ""


ALWAYS = ("out", "model", "seed", "threads")


def keys_read() -> dict[str, list[str]]:
    return tomllib.loads(Path(__file__).with_name("verbs.toml").read_text())


def refuse_without_effect(verb: str, given: Iterable[str]) -> None:
    """Refuse an option of the command line that `verb` does not read."""
    places = keys_read().get(verb, [])
    for key in given:
        matching = [place for place in places if f"{key}.".startswith(f"{place.lstrip('!')}.")]
        if places and (not matching or any(place.startswith("!") for place in matching)):
            read = ", ".join(place for place in places if place not in ALWAYS and not place.startswith("!"))
            raise ConfigError(f"{key} has no effect on `offbook {verb}`, which reads {read}; leave it out")
