"""Right bodies in other words: each has to be paid on its task. `right` is the one that bodies.py builds upon."""

# ruff: noqa: E501
from __future__ import annotations

from blind_data.bodies import Body
from blind_data.targets import TARGETS

CODE = {
    "reduced_groups": (
        "reduceby",
        """
import functools
take = key if callable(key) else (lambda item: tuple(item[k] for k in key) if isinstance(key, list) else item[key])
groups = {}
for item in seq:
    groups.setdefault(take(item), []).append(item)
if init == no_default:
    return {name: functools.reduce(binop, items) for name, items in groups.items()}
return {name: functools.reduce(binop, items, init() if callable(init) else init) for name, items in groups.items()}
""",
    ),
    "kept_pairs": (
        "valfilter",
        "result = factory()\nresult.update((name, value) for name, value in d.items() if predicate(value))\nreturn result\n",
    ),
    "asks_for_an_iterator": (
        "isiterable",
        "try:\n    iterator = iter(x)\nexcept TypeError:\n    return False\nreturn iterator is not None\n",
    ),
    "one_expression": (
        "underscore",
        r"""
parts = re.sub(r"(?<=[a-z\d])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", word)
return "_".join(parts.split("-")).lower()
""",
    ),
    "words_and_separators": (
        "parameterize",
        """
kept = [c if c.isascii() and (c.isalnum() or c in "-_") else "\\0" for c in transliterate(string)]
words = "".join(kept).split("\\0")
if not separator:
    return "".join(words).lower()
slug = separator.join(word for number, word in enumerate(words) if word or number in (0, len(words) - 1))
while separator + separator in slug:
    slug = slug.replace(separator + separator, separator)
return slug.removeprefix(separator).removesuffix(separator).lower()
""",
    ),
    "first_rule": (
        "singularize",
        """
if any(re.search(r"(?i)\\b(" + name + r")\\Z", word) for name in UNCOUNTABLES):
    return word
rule = next((rule for rule in SINGULARS if re.search(rule[0], word)), None)
return re.sub(*rule, word) if rule else word
""",
    ),
    "hits_and_places": (
        "adjacent",
        """
if distance < 0:
    raise ValueError("distance must be >= 0")
items = list(iterable)
near = set()
for place, item in enumerate(items):
    if predicate(item):
        near.update(range(place - distance, place + distance + 1))
return [(place in near, item) for place, item in enumerate(items)]
""",
    ),
    "windows": (
        "replace",
        """
if window_size < 1:
    raise ValueError("window_size must be >= 1")
items, new = list(iterable), list(substitutes)
left = float("inf") if count is None else count
place = 0
while place < len(items):
    if left > 0 and pred(*items[place : place + window_size]):
        left -= 1
        place += window_size
        yield from new
    else:
        yield items[place]
        place += 1
""",
    ),
    "reflected": (
        "gray_product",
        """
pools = [list(pool) for pool in iterables] * repeat
if any(len(pool) < 2 for pool in pools):
    raise ValueError("each iterable must have two or more items")
rows = [()]
for pool in pools:
    turns = (rows, rows[::-1])
    rows = [(*row, item) for number, item in enumerate(pool) for row in turns[number % 2]]
return iter(rows)
""",
    ),
    "mantissa_and_exponent": (
        "scientific",
        """
import math
try:
    number = float(value)
except (TypeError, ValueError):
    return str(value)
if math.isnan(number):
    return "NaN"
if math.isinf(number):
    return "+Inf" if number > 0 else "-Inf"
mantissa, exponent = format(number, f".{precision}e").split("e")
return mantissa + " x 10" + "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(c)] if c.isdigit() else "⁻" for c in str(int(exponent)))
""",
    ),
    "attributes": (
        "with_pattern",
        "def mark(function):\n    function.pattern = pattern\n    function.regex_group_count = regex_group_count\n    return function\n\nreturn mark\n",
    ),
}
BODIES = {name: Body("honest", code, (target,)) for name, (target, code) in CODE.items()}
BODIES["right"] = Body(
    "honest",
    "return _right(ARGS)\n",
    tuple(name for name, one in TARGETS.items() if one.right and "*" not in one.parameters),
)
