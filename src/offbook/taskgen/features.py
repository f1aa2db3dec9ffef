"""Features: a function and every function that only its tests enter; and clusters of neighbouring ones."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from offbook.taskgen.delete.symbols import Function, Symbols
from offbook.taskgen.nouns import Feature, FunctionKey, Kind, Map

ByTests = dict[frozenset[str], list[FunctionKey]]  # functions by the tests that enter them


@dataclass(frozen=True, slots=True)
class FeatureSettings:
    repo: str  # begins every feature's id
    max_share: float = 0.25  # of all tests, for a single feature
    max_cluster_share: float = 1 / 3
    min_statements: int = 4
    max_functions: int = 40
    max_lines: int = 400
    max_overlap: float = 0.75  # of two features' lines; above it the smaller one is dropped
    min_cluster_lines: int = 40
    max_members: int = 4  # single features in a cluster
    min_clusters: float = 0.1  # as a share of the singles
    across_files: float = 0.25  # share of all features that touch more than one file, where clusters can bring it there


def find_features(symbols: Symbols, map: Map, tests: tuple[str, ...], settings: FeatureSettings) -> list[Feature]:
    """Singles first, then clusters; the same order and ids for the same input."""
    singles = _distinct(_singles(symbols, _by_tests(symbols, map, tests), len({*tests}), settings), symbols, settings)
    return singles + _clusters(singles, symbols, len({*tests}), settings)


def left_out(
    symbols: Symbols, map: Map, tests: tuple[str, ...], features: Iterable[Feature], settings: FeatureSettings
) -> dict[FunctionKey, str]:
    """Why the functions that are in none of the features are in none. Nested ones are parts of those around them."""
    used = {key for feature in features for key in feature.functions}
    by_tests = _by_tests(symbols, map, tests)
    why = dict.fromkeys(map.at_import, "it runs at import")
    for entering, keys in by_tests.items():
        if not used.issuperset(keys):
            reason = _refused(entering, by_tests, symbols, len({*tests}), settings)
            why |= dict.fromkeys(keys, reason or "nearly all of it is in another candidate")
    return {
        key: why.get(key, "no reliable test enters it")
        for key, function in symbols.functions.items()
        if key not in used and not function.nested
    }


def gold_lines(functions: Iterable[FunctionKey], symbols: Symbols) -> int:
    """About as many lines as a patch adds that brings the functions' bodies back."""
    whole = set(functions)
    return sum(symbols.functions[key].body_lines for key in whole if not _inside(key, whole))


def _inside(key: FunctionKey, whole: set[FunctionKey]) -> bool:
    """Whether a function around it is in the set as well."""
    parts = key.name.split(".<locals>.")
    return any(FunctionKey(key.path, ".<locals>.".join(parts[:end])) in whole for end in range(1, len(parts)))


def _by_tests(symbols: Symbols, map: Map, tests: tuple[str, ...]) -> ByTests:
    """Functions with the same tests have the same closure."""
    reliable = frozenset(tests)
    found: ByTests = defaultdict(list)
    for key, entering in map.tests_of.items():
        if key in symbols.functions and key not in map.at_import and entering & reliable:
            found[entering & reliable].append(key)
    return found


def _singles(symbols: Symbols, by_tests: ByTests, num_tests: int, settings: FeatureSettings) -> list[Feature]:
    found = []
    for entering, keys in by_tests.items():
        if not _refused(entering, by_tests, symbols, num_tests, settings):
            candidates = [symbols.functions[key] for key in keys if _can_be_target(symbols.functions[key])]
            target = min(candidates, key=lambda function: _preference(function, set(keys), symbols)).key
            found.append(_feature(settings.repo, "single", [target], _closure(entering, by_tests), entering))
    return sorted(found, key=lambda feature: feature.targets)


def _closure(entering: frozenset[str], by_tests: ByTests) -> list[FunctionKey]:
    return [key for others, members in by_tests.items() if others <= entering for key in members]


def _can_be_target(function: Function) -> bool:
    return not (function.nested or function.dunder or function.is_declaration)


def _refused(
    entering: frozenset[str], by_tests: ByTests, symbols: Symbols, num_tests: int, settings: FeatureSettings
) -> str:
    """Why the functions with these tests and their closure make no feature; empty where they do."""
    if len(entering) > settings.max_share * num_tests:
        return f"over {settings.max_share:.0%} of the tests enter it"
    closure = _closure(entering, by_tests)
    functions = [symbols.functions[key] for key in closure]
    real = [f for f in functions if not f.is_declaration and not (f.is_property and f.statements == 1)]
    targets = any(_can_be_target(symbols.functions[key]) for key in by_tests[entering])
    if not targets or all(function.dunder for function in real):
        return "it is a special method, or has no body of its own"
    if sum(function.statements for function in real if not function.nested) < settings.min_statements:
        return f"with all that only its tests enter, it has under {settings.min_statements} statements"
    if len(functions) > settings.max_functions or gold_lines(closure, symbols) > settings.max_lines:
        limits = f"{settings.max_functions} functions or {settings.max_lines} lines"
        return f"with all that only its tests enter, it has over {limits}"
    return ""


def _preference(
    function: Function, same_tests: set[FunctionKey], symbols: Symbols
) -> tuple[bool, bool, bool, int, FunctionKey]:
    """Public before private, called from outside before called by its equals, long before short."""
    called_by_equals = any(caller in same_tests for caller in symbols.callers[function.key])
    return not function.public, function.is_property, called_by_equals, -function.statements, function.key


def _feature(
    repo: str, kind: Kind, targets: Iterable[FunctionKey], functions: Iterable[FunctionKey], tests: Iterable[str]
) -> Feature:
    targets, functions = tuple(sorted(set(targets))), tuple(sorted(set(functions)))
    path = PurePosixPath(targets[0].path)
    module = path.parent.name if path.name == "__init__.py" else path.stem
    name = targets[0].name if kind == "single" else f"{targets[0].name}-and-{len(targets) - 1}"
    digest = hashlib.sha256("\n".join(f"{key.path}::{key.name}" for key in functions).encode()).hexdigest()[:6]
    identity = re.sub(r"[^a-z0-9]+", "-", f"{repo}-{module}-{name}-{digest}".lower())
    return Feature(identity, kind, targets, functions, tuple(sorted(set(tests))))


def _distinct(features: list[Feature], symbols: Symbols, settings: FeatureSettings) -> list[Feature]:
    """Without near-duplicates: of two that mostly share their lines the larger one stays."""
    kept: list[Feature] = []
    for feature in sorted(features, key=lambda f: (-gold_lines(f.functions, symbols), f.id)):
        if all(_overlap(feature, other, symbols) <= settings.max_overlap for other in kept):
            kept.append(feature)
    return sorted(kept, key=lambda feature: feature.targets)


def _overlap(one: Feature, other: Feature, symbols: Symbols) -> float:
    """Lines in both as a share of the lines in either."""
    shared = {*one.functions} & {*other.functions}
    return _weight(shared, symbols) / _weight({*one.functions} | {*other.functions}, symbols) if shared else 0.0


def _weight(functions: Iterable[FunctionKey], symbols: Symbols) -> int:
    return sum(symbols.functions[key].body_lines + 1 for key in functions)


def _files(features: Iterable[Feature]) -> set[str]:
    return {key.path for feature in features for key in feature.functions}


def _clusters(singles: list[Feature], symbols: Symbols, num_tests: int, settings: FeatureSettings) -> list[Feature]:
    """Greedy: each single grows by its nearest neighbours until it is large enough. Each single is used once."""
    clusters: list[Feature] = []
    free = {feature.id: feature for feature in singles} if len(_files(singles)) > 1 else {}
    wide = sum(len(_files([feature])) > 1 for feature in singles)
    for seed in sorted(singles, key=lambda feature: (-gold_lines(feature.functions, symbols), feature.id)):
        enough = len(clusters) >= settings.min_clusters * len(singles)
        if enough and wide + len(clusters) >= settings.across_files * (len(singles) + len(clusters)):
            break
        members = _grown(seed, free, symbols, num_tests, settings) if seed.id in free else []
        if not members:
            continue
        whole = merged(members, settings)
        if all(_overlap(whole, single, symbols) <= settings.max_overlap for single in singles):
            clusters.append(whole)
            for member in members:
                del free[member.id]
    return sorted(clusters, key=lambda feature: feature.targets)


def merged(members: Iterable[Feature], settings: FeatureSettings) -> Feature:
    """One feature of several."""
    members = list(members)
    return _feature(
        settings.repo,
        "cluster",
        [key for member in members for key in member.targets],
        [key for member in members for key in member.functions],
        [test for member in members for test in member.tests],
    )


def nearest(
    feature: Feature, others: Iterable[Feature], symbols: Symbols, num_tests: int, settings: FeatureSettings
) -> Feature | None:
    """The neighbour that goes best with it, within the limits of a cluster."""
    near = [
        (_nearness([feature], other, symbols), other.id, other)
        for other in others
        if _adds([feature], other) and _fits([feature, other], symbols, num_tests, settings)
    ]
    nearness, _, best = max(near, default=((0, 0, 0, 0), "", None), key=lambda entry: entry[:2])
    return best if any(nearness) else None


def closure(symbols: Symbols, map: Map, tests: Iterable[str]) -> list[FunctionKey]:
    """Every function that these tests enter and no others do, and that does not run at import."""
    mine = frozenset(tests)
    return sorted(
        key
        for key, entering in map.tests_of.items()
        if key in symbols.functions and key not in map.at_import and entering <= mine
    )


def _grown(
    seed: Feature, free: Mapping[str, Feature], symbols: Symbols, num_tests: int, settings: FeatureSettings
) -> list[Feature]:
    """The seed and its neighbours, or nothing where they do not get large enough within the limits."""
    members = [seed]
    while len(members) < settings.max_members:
        near = [
            (_nearness(members, other, symbols), other.id)
            for other in free.values()
            if _adds(members, other) and _fits([*members, other], symbols, num_tests, settings)
        ]
        nearness, nearest = max(near, default=((0, 0, 0, 0), ""))
        if not any(nearness[1:]):
            return []
        members.append(free[nearest])
        functions = {key for member in members for key in member.functions}
        if len(_files(members)) > 1 and gold_lines(functions, symbols) >= settings.min_cluster_lines:
            return members
    return []


def _adds(members: list[Feature], other: Feature) -> bool:
    """Neither is part of the other."""
    whole, own = {key for member in members for key in member.functions}, {*other.functions}
    return not own <= whole and not whole <= own


def _fits(members: list[Feature], symbols: Symbols, num_tests: int, settings: FeatureSettings) -> bool:
    functions = {key for member in members for key in member.functions}
    return (
        len({test for member in members for test in member.tests}) <= settings.max_cluster_share * num_tests
        and len(functions) <= settings.max_functions
        and gold_lines(functions, symbols) <= settings.max_lines
    )


def _nearness(members: list[Feature], other: Feature, symbols: Symbols) -> tuple[int, int, int, int]:
    """Another file first (a cluster spans two), then calls between them, shared tests, and folders in common."""
    whole, own = {key for member in members for key in member.functions}, {*other.functions}
    calls = sum(caller in own for key in whole for caller in symbols.callers[key])
    calls += sum(caller in whole for key in own for caller in symbols.callers[key])
    shared = {test for member in members for test in member.tests} & {*other.tests}
    folders = {PurePosixPath(path).parent for path in _files(members)}
    family = any(PurePosixPath(path).parent in folders for path in _files([other]))
    return int(not _files([other]) <= _files(members)), calls, len(shared), int(family)
