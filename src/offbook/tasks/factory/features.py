"""Features: a function and what it uses that only its tests enter; and clusters of neighbouring ones.

Tests alone would tie strangers together: the words of an error to saving and loading, because one test enters both.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from offbook.tasks.factory.delete.symbols import Function, Symbols
from offbook.tasks.factory.types import BUILTIN, Feature, FunctionKey, Kind, Map, identity_of

ERRORS = ("Error", "Exception", "Warning")


@dataclass(frozen=True)
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
    clusters: float = 0.25  # at most so many for each single feature


class Finder:
    """Finds features in a repository's functions, by the reliable tests that enter them and by who uses whom."""

    def __init__(self, symbols: Symbols, map: Map, tests: Iterable[str], settings: FeatureSettings):
        self.symbols = symbols
        self.settings = settings
        reliable = frozenset(tests)
        self.num_tests = len(reliable)
        # Functions with the same tests have the same closure.
        self._by_tests: dict[frozenset[str], list[FunctionKey]] = defaultdict(list)
        self._methods: dict[FunctionKey, set[FunctionKey]] = defaultdict(set)  # that tests enter, by class
        for key, function in symbols.functions.items():
            entering = map.tests_of.get(key, frozenset())
            if entering & reliable and key not in map.at_import:
                self._by_tests[entering & reliable].append(key)
            if entering and function.owner:
                self._methods[FunctionKey(key.path, function.owner)].add(key)
        self._tests_of = {key: entering for entering, keys in self._by_tests.items() for key in keys}
        self._uses = self._used()

    def _used(self) -> dict[FunctionKey, set[FunctionKey]]:
        """What each uses: resolved, by the name of a method that only one class has, and its inner functions."""
        by_name: dict[str, list[FunctionKey]] = defaultdict(list)
        for key, function in self.symbols.functions.items():
            if function.owner and key.simple not in BUILTIN:
                by_name[key.simple].append(key)
        used: dict[FunctionKey, set[FunctionKey]] = {key: set() for key in self.symbols.functions}
        for key in used:
            calls = self.symbols.calls[key]
            used[key] |= calls.functions & used.keys()
            used[key] |= {by_name[name][0] for name in calls.unknown if len(by_name.get(name, ())) == 1}
            around = FunctionKey(key.path, key.name.rpartition(".<locals>.")[0])
            if around in used:
                used[around].add(key)
        return used

    def features(self) -> list[Feature]:
        """Singles first, then clusters; the same order and ids for the same input."""
        found = [single for entering in self._by_tests for single in self._singles(entering)]
        singles: list[Feature] = []
        for single in self._largest_first(found):
            if self._is_new(single, singles):
                singles.append(single)
        singles.sort(key=lambda feature: feature.targets)
        return singles + self._clusters(singles)

    def closure(self, targets: Iterable[FunctionKey], tests: Iterable[str]) -> set[FunctionKey]:
        """The targets and what they use, and so on, that these tests enter, no others do, and does not run at import.

        A class that nothing else enters is one thing, with all its methods; an error only where it is asked for.
        Callers of a target stay, and show what it is for.
        """
        mine = frozenset(tests)

        def is_ours(key: FunctionKey) -> bool:
            return key in self._tests_of and self._tests_of[key] <= mine

        found: set[FunctionKey] = set()
        waiting = [*targets]
        while waiting:
            key = waiting.pop()
            if key in found or not is_ours(key):
                continue
            found.add(key)
            waiting += self._uses[key]
            own = FunctionKey(key.path, self.symbols.functions[key].owner)
            for owner in {own, *self.symbols.calls[key].classes}:
                is_error = owner != own and owner.name.endswith(ERRORS)
                if not is_error and all(map(is_ours, self._methods[owner])):
                    waiting += self._methods[owner]
        return found

    def _singles(self, entering: frozenset[str]) -> Iterator[Feature]:
        """Features of the functions with just these tests: one with what it leads to, another if some are left."""
        same_tests = self._by_tests[entering]
        left = {*same_tests}
        if len(entering) > self.settings.max_share * self.num_tests:
            return

        def preference(function: Function) -> tuple[bool, bool, bool, int, FunctionKey]:
            """Public before private, called from outside before called by its equals, long before short."""
            called_by_equals = any(caller in same_tests for caller in self.symbols.callers[function.key])
            return not function.public, function.is_property, called_by_equals, -function.statements, function.key

        while left:
            functions = [self.symbols.functions[key] for key in left]
            possible = [f for f in functions if not (f.nested or f.dunder or f.is_declaration)]
            if not possible:
                return
            target = min(possible, key=preference).key
            closure = self.closure([target], entering)
            left -= closure
            inside = [self.symbols.functions[key] for key in closure]
            real = [f for f in inside if not f.is_declaration and not (f.is_property and f.statements == 1)]
            statements = sum(function.statements for function in real if not function.nested)
            has_substance = statements >= self.settings.min_statements and not all(f.dunder for f in real)
            if has_substance and self._is_small(closure):
                yield self.feature("single", [target], closure, entering)

    def _is_small(self, functions: Collection[FunctionKey]) -> bool:
        is_short = gold_lines(functions, self.symbols) <= self.settings.max_lines
        return is_short and len(functions) <= self.settings.max_functions

    def feature(
        self, kind: Kind, targets: Iterable[FunctionKey], functions: Iterable[FunctionKey], tests: Iterable[str]
    ) -> Feature:
        targets = tuple(sorted({*targets}))
        functions = tuple(sorted({*functions}))
        path = PurePosixPath(targets[0].path)
        module = path.parent.name if path.name == "__init__.py" else path.stem
        name = targets[0].name if kind == "single" else f"{targets[0].name}-and-{len(targets) - 1}"
        digest = hashlib.sha256("\n".join(map(str, functions)).encode()).hexdigest()[:6]
        identity = identity_of(self.settings.repo, module, name, digest)
        return Feature(identity, kind, targets, functions, tuple(sorted({*tests})))

    def merged(self, one: Feature, other: Feature) -> Feature:
        """One feature of two."""
        functions = one.functions + other.functions
        return self.feature("cluster", one.targets + other.targets, functions, one.tests + other.tests)

    def _largest_first(self, features: Iterable[Feature]) -> list[Feature]:
        return sorted(features, key=lambda feature: (-gold_lines(feature.functions, self.symbols), feature.id))

    def _is_new(self, feature: Feature, others: Iterable[Feature]) -> bool:
        """Whether no other one has too many of the lines that either has."""

        def lines(functions: Iterable[FunctionKey]) -> int:
            return sum(self.symbols.functions[key].body_lines + 1 for key in functions)

        mine = {*feature.functions}
        shared = ((mine.intersection(other.functions), mine.union(other.functions)) for other in others)
        return not any(lines(both) > self.settings.max_overlap * lines(either) for both, either in shared)

    def _clusters(self, singles: list[Feature]) -> list[Feature]:
        """Greedy: each single grows by its nearest neighbours until it is large enough. Each single is used once."""
        clusters: list[Feature] = []
        free = {feature.id: feature for feature in singles}
        for seed in self._largest_first(singles):
            if len(clusters) >= self.settings.clusters * len(singles):
                break
            whole = seed
            members = [seed.id]
            while seed.id in free and len(members) < self.settings.max_members:
                other = self.nearest(whole, free.values())
                if other is None:
                    break
                whole = self.merged(whole, other)
                members.append(other.id)
                is_large = gold_lines(whole.functions, self.symbols) >= self.settings.min_cluster_lines
                if is_large and len(_files(whole)) > 1:
                    if self._is_new(whole, singles):
                        clusters.append(whole)
                        for member in members:
                            del free[member]
                    break
        return sorted(clusters, key=lambda feature: feature.targets)

    def nearest(self, whole: Feature, others: Iterable[Feature]) -> Feature | None:
        """The feature that goes best with it, within the limits of a cluster: one of another file first (a cluster
        spans two), then by calls between them. Lying in one folder is no reason."""
        mine = {*whole.functions}
        best = None
        best_nearness = (False, 0, "")
        for other in others:
            own = {*other.functions}
            calls = sum(caller in own for key in mine for caller in self.symbols.callers[key])
            calls += sum(caller in mine for key in own for caller in self.symbols.callers[key])
            nearness = (not _files(other) <= _files(whole), calls, other.id)
            is_part = own <= mine or mine <= own
            if not calls or is_part or nearness <= best_nearness or not self._is_small(mine | own):
                continue
            if len({*whole.tests, *other.tests}) <= self.settings.max_cluster_share * self.num_tests:
                best = other
                best_nearness = nearness
        return best


def gold_lines(functions: Iterable[FunctionKey], symbols: Symbols) -> int:
    """About as many lines as a patch adds that brings the functions' bodies back."""
    whole = set(functions)
    return sum(symbols.functions[key].body_lines for key in whole if not key.is_inside(whole))


def _files(feature: Feature) -> set[str]:
    return {key.path for key in feature.functions}
