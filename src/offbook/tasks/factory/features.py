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
        for key, entering in map.tests_of.items():
            if key not in symbols.functions:
                continue
            if key not in map.at_import and entering & reliable:
                self._by_tests[entering & reliable].append(key)
            if owner := symbols.functions[key].owner:
                self._methods[FunctionKey(key.path, owner)].add(key)
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
            for owner in {own, *(self.symbols.calls[key].classes - self.symbols.errors)}:
                methods = self._methods.get(owner, set())
                if all(map(is_ours, methods)):
                    waiting += methods
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
            if self._is_right_size(closure):
                yield self.feature("single", [target], closure, entering)

    def _is_right_size(self, closure: Collection[FunctionKey]) -> bool:
        settings = self.settings
        functions = [self.symbols.functions[key] for key in closure]
        real = [f for f in functions if not f.is_declaration and not (f.is_property and f.statements == 1)]
        statements = sum(function.statements for function in real if not function.nested)
        if statements < settings.min_statements or all(function.dunder for function in real):
            return False
        return len(functions) <= settings.max_functions and gold_lines(closure, self.symbols) <= settings.max_lines

    def feature(
        self, kind: Kind, targets: Iterable[FunctionKey], functions: Iterable[FunctionKey], tests: Iterable[str]
    ) -> Feature:
        targets = tuple(sorted(set(targets)))
        functions = tuple(sorted(set(functions)))
        path = PurePosixPath(targets[0].path)
        module = path.parent.name if path.name == "__init__.py" else path.stem
        name = targets[0].name if kind == "single" else f"{targets[0].name}-and-{len(targets) - 1}"
        digest = hashlib.sha256("\n".join(map(str, functions)).encode()).hexdigest()[:6]
        identity = identity_of(self.settings.repo, module, name, digest)
        return Feature(identity, kind, targets, functions, tuple(sorted(set(tests))))

    def _largest_first(self, features: Iterable[Feature]) -> list[Feature]:
        return sorted(features, key=lambda feature: (-gold_lines(feature.functions, self.symbols), feature.id))

    def _is_new(self, feature: Feature, others: Iterable[Feature]) -> bool:
        """Whether no other one has too many of the lines that either has."""

        def lines(functions: Iterable[FunctionKey]) -> int:
            return sum(self.symbols.functions[key].body_lines + 1 for key in functions)

        mine = {*feature.functions}
        for other in others:
            theirs = {*other.functions}
            if lines(mine & theirs) > self.settings.max_overlap * lines(mine | theirs):
                return False
        return True

    def _clusters(self, singles: list[Feature]) -> list[Feature]:
        """Greedy: each single grows by its nearest neighbours until it is large enough. Each single is used once."""
        clusters: list[Feature] = []
        free = {feature.id: feature for feature in singles}
        for seed in self._largest_first(singles):
            if len(clusters) >= self.settings.clusters * len(singles):
                break
            members = self._grown(seed, free.values()) if seed.id in free else []
            whole = self.merged(members) if members else None
            if whole and self._is_new(whole, singles):
                clusters.append(whole)
                for member in members:
                    del free[member.id]
        return sorted(clusters, key=lambda feature: feature.targets)

    def merged(self, members: Collection[Feature]) -> Feature:
        """One feature of several."""
        targets = [key for member in members for key in member.targets]
        return self.feature("cluster", targets, _functions(members), _tests(members))

    def _grown(self, seed: Feature, free: Collection[Feature]) -> list[Feature]:
        """The seed and its neighbours, or nothing where they do not get large enough within the limits."""
        members = [seed]
        while len(members) < self.settings.max_members:
            nearest = self.nearest(members, free)
            if nearest is None:
                return []
            members.append(nearest)
            lines = gold_lines(_functions(members), self.symbols)
            if len(_files(members)) > 1 and lines >= self.settings.min_cluster_lines:
                return members
        return []

    def nearest(self, members: Collection[Feature], others: Iterable[Feature]) -> Feature | None:
        """The feature that goes best with them, within the limits of a cluster: one of another file first (a cluster
        spans two), then by calls between them. Lying in one folder is no reason."""
        whole = _functions(members)
        best = None
        best_nearness = (False, 0, "")
        for other in others:
            own = {*other.functions}
            calls = sum(caller in own for key in whole for caller in self.symbols.callers[key])
            calls += sum(caller in whole for key in own for caller in self.symbols.callers[key])
            nearness = (not _files([other]) <= _files(members), calls, other.id)
            is_part = own <= whole or whole <= own
            if calls and nearness > best_nearness and not is_part and self._fits([*members, other]):
                best = other
                best_nearness = nearness
        return best

    def _fits(self, members: Collection[Feature]) -> bool:
        functions = _functions(members)
        few_tests = len(_tests(members)) <= self.settings.max_cluster_share * self.num_tests
        few_functions = len(functions) <= self.settings.max_functions
        return few_tests and few_functions and gold_lines(functions, self.symbols) <= self.settings.max_lines


def gold_lines(functions: Iterable[FunctionKey], symbols: Symbols) -> int:
    """About as many lines as a patch adds that brings the functions' bodies back."""
    whole = set(functions)
    return sum(symbols.functions[key].body_lines for key in whole if not key.is_inside(whole))


def _functions(features: Iterable[Feature]) -> set[FunctionKey]:
    return {key for feature in features for key in feature.functions}


def _tests(features: Iterable[Feature]) -> set[str]:
    return {test for feature in features for test in feature.tests}


def _files(features: Iterable[Feature]) -> set[str]:
    return {key.path for key in _functions(features)}
