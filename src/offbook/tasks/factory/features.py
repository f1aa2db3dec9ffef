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
    min_shared: float = 0.5  # of the tests of the smaller one, for two that do not call one another
    min_clusters: float = 0.1  # as a share of the singles
    across_files: float = 0.25  # share of all features that touch more than one file, where clusters can bring it there


@dataclass(frozen=True)
class _Candidate:
    """A function and what it leads to and only these tests enter."""

    tests: frozenset[str]
    target: FunctionKey
    functions: frozenset[FunctionKey]


class Finder:
    """Finds features in a repository's functions, by the reliable tests that enter them and by who uses whom."""

    def __init__(self, symbols: Symbols, map: Map, tests: Iterable[str], settings: FeatureSettings):
        self.symbols = symbols
        self.settings = settings
        self._at_import = map.at_import
        reliable = frozenset(tests)
        self.num_tests = len(reliable)
        # Functions with the same tests have the same closure.
        self._by_tests: dict[frozenset[str], list[FunctionKey]] = defaultdict(list)
        for key, entering in map.tests_of.items():
            if key in symbols.functions and key not in map.at_import and entering & reliable:
                self._by_tests[entering & reliable].append(key)
        self._tests_of = {key: entering for entering, keys in self._by_tests.items() for key in keys}
        self._methods: dict[FunctionKey, set[FunctionKey]] = defaultdict(set)  # that tests enter, by class
        for key in map.tests_of.keys() & symbols.functions.keys():
            if owner := symbols.functions[key].owner:
                self._methods[FunctionKey(key.path, owner)].add(key)
        # What each uses: resolved, by the name of a method that only one class has, and its inner functions.
        by_name: dict[str, list[FunctionKey]] = defaultdict(list)
        for key, function in self.symbols.functions.items():
            if function.owner and key.simple not in BUILTIN:
                by_name[key.simple].append(key)
        used: dict[FunctionKey, set[FunctionKey]] = {key: set() for key in self.symbols.functions}
        for key in self.symbols.functions:
            calls = self.symbols.calls[key]
            used[key] |= calls.functions & used.keys()
            used[key] |= {by_name[name][0] for name in calls.unknown if len(by_name.get(name, ())) == 1}
            around = FunctionKey(key.path, key.name.rpartition(".<locals>.")[0])
            if around in used:
                used[around].add(key)
        self._uses = used
        self._candidates = [candidate for entering in self._by_tests for candidate in self._of_tests(entering)]

    def features(self) -> list[Feature]:
        """Singles first, then clusters; the same order and ids for the same input."""
        singles = self._distinct(self._singles())
        return singles + self._clusters(singles)

    def left_out(self, features: Iterable[Feature]) -> dict[FunctionKey, str]:
        """Why functions are in none of the features. Nested ones are parts of those around them."""
        used = {key for feature in features for key in feature.functions}
        why = dict.fromkeys(self._at_import, "it runs at import")
        for candidate in self._candidates:
            if not used.issuperset(candidate.functions):
                reason = self._refused(candidate) or "nearly all of it is in another candidate"
                why |= dict.fromkeys(candidate.functions & {*self._by_tests[candidate.tests]}, reason)
        return {
            key: why.get(key, "no reliable test enters it")
            for key, function in self.symbols.functions.items()
            if key not in used and not function.nested
        }

    def closure(self, targets: Iterable[FunctionKey], tests: Iterable[str]) -> set[FunctionKey]:
        """The targets and what they use, and so on, that these tests enter, no others do, and does not run at import.

        A class that nothing else enters is one thing, with all its methods; an error only where it is asked for.
        Whoever uses a target stays, and shows what it is for.
        """
        mine = frozenset(tests)
        found: set[FunctionKey] = set()
        waiting = [*targets]
        while waiting:
            key = waiting.pop()
            if key in found or not self._only(key, mine):
                continue
            found.add(key)
            waiting += self._uses[key]
            own = FunctionKey(key.path, self.symbols.functions[key].owner)
            for owner in {own, *(self.symbols.calls[key].classes - self.symbols.errors)}:
                methods = self._methods.get(owner, set())
                if all(self._only(method, mine) for method in methods):
                    waiting += methods
        return found

    def _only(self, key: FunctionKey, tests: frozenset[str]) -> bool:
        return key in self._tests_of and self._tests_of[key] <= tests

    def _of_tests(self, entering: frozenset[str]) -> Iterator[_Candidate]:
        """Candidates for the functions with just these tests: one with what it leads to, another if some are left."""
        left = {*self._by_tests[entering]}
        if len(entering) > self.settings.max_share * self.num_tests:
            yield _Candidate(entering, min(left), frozenset(left))  # too many to make a feature of
            return
        while left:
            possible = [f for key in left if _can_be_target(f := self.symbols.functions[key])]
            same_tests = self._by_tests[entering]
            target = min(possible, key=lambda f: self._preference(f, same_tests)).key if possible else min(left)
            functions = self.closure([target], entering)
            yield _Candidate(entering, target, frozenset(functions))
            left -= functions

    def _singles(self) -> list[Feature]:
        found = [
            self.feature("single", [candidate.target], candidate.functions, candidate.tests)
            for candidate in self._candidates
            if not self._refused(candidate)
        ]
        return sorted(found, key=lambda feature: feature.targets)

    def _refused(self, candidate: _Candidate) -> str:
        """Why the functions with these tests and what is tied to them make no feature; empty where they do."""
        settings = self.settings
        if len(candidate.tests) > settings.max_share * self.num_tests:
            return f"over {settings.max_share:.0%} of the tests enter it"
        functions = [self.symbols.functions[key] for key in candidate.functions]
        real = [f for f in functions if not f.is_declaration and not (f.is_property and f.statements == 1)]
        if not _can_be_target(self.symbols.functions[candidate.target]) or all(function.dunder for function in real):
            return "it is a special method, or has no body of its own"
        if sum(function.statements for function in real if not function.nested) < settings.min_statements:
            return f"with what only its tests enter, it has under {settings.min_statements} statements"
        lines = gold_lines(candidate.functions, self.symbols)
        if len(functions) > settings.max_functions or lines > settings.max_lines:
            limits = f"{settings.max_functions} functions or {settings.max_lines} lines"
            return f"with what only its tests enter, it has over {limits}"
        return ""

    def _preference(
        self, function: Function, same_tests: Collection[FunctionKey]
    ) -> tuple[bool, bool, bool, int, FunctionKey]:
        """Public before private, called from outside before called by its equals, long before short."""
        called_by_equals = any(caller in same_tests for caller in self.symbols.callers[function.key])
        return not function.public, function.is_property, called_by_equals, -function.statements, function.key

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

    def _distinct(self, features: list[Feature]) -> list[Feature]:
        """Without near-duplicates: of two that mostly share their lines the larger one stays."""
        kept: list[Feature] = []
        for feature in self._largest_first(features):
            if self._is_new(feature, kept):
                kept.append(feature)
        return sorted(kept, key=lambda feature: feature.targets)

    def _largest_first(self, features: Iterable[Feature]) -> list[Feature]:
        return sorted(features, key=lambda feature: (-gold_lines(feature.functions, self.symbols), feature.id))

    def _is_new(self, feature: Feature, others: Iterable[Feature]) -> bool:
        """Whether no other one has too many of the lines that either has."""
        mine = {*feature.functions}
        return all(
            not (shared := mine & {*other.functions})
            or self._weight(shared) / self._weight(mine | {*other.functions}) <= self.settings.max_overlap
            for other in others
        )

    def _weight(self, functions: Iterable[FunctionKey]) -> int:
        return sum(self.symbols.functions[key].body_lines + 1 for key in functions)

    def _clusters(self, singles: list[Feature]) -> list[Feature]:
        """Greedy: each single grows by its nearest neighbours until it is large enough. Each single is used once."""
        clusters: list[Feature] = []
        free = {feature.id: feature for feature in singles} if len(_files(singles)) > 1 else {}
        wide = sum(len(_files([feature])) > 1 for feature in singles)
        for seed in self._largest_first(singles):
            enough = len(clusters) >= self.settings.min_clusters * len(singles)
            if enough and wide + len(clusters) >= self.settings.across_files * (len(singles) + len(clusters)):
                break
            members = self._grown(seed, free.values()) if seed.id in free else []
            if not members:
                continue
            whole = self.merged(members)
            if self._is_new(whole, singles):
                clusters.append(whole)
                for member in members:
                    del free[member.id]
        return sorted(clusters, key=lambda feature: feature.targets)

    def merged(self, members: Collection[Feature]) -> Feature:
        """One feature of several."""
        return self.feature(
            "cluster",
            [key for member in members for key in member.targets],
            _functions(members),
            [test for member in members for test in member.tests],
        )

    def _grown(self, seed: Feature, free: Collection[Feature]) -> list[Feature]:
        """The seed and its neighbours, or nothing where they do not get large enough within the limits."""
        members = [seed]
        while len(members) < self.settings.max_members:
            nearness, nearest = self.nearest(members, free)
            if nearest is None or not any(nearness[1:]):  # a stranger
                return []
            members.append(nearest)
            large = gold_lines(_functions(members), self.symbols) >= self.settings.min_cluster_lines
            if len(_files(members)) > 1 and large:
                return members
        return []

    def nearest(
        self, members: Collection[Feature], others: Iterable[Feature]
    ) -> tuple[tuple[int, int, int], Feature | None]:
        """The neighbour that goes best with them, within the limits of a cluster, and how near it is."""
        near = [
            (self._nearness(members, other), other.id, other)
            for other in others
            if _adds(members, other) and self._fits([*members, other])
        ]
        nearness, _, best = max(near, default=((0, 0, 0), "", None), key=lambda entry: entry[:2])
        return nearness, best

    def _fits(self, members: Collection[Feature]) -> bool:
        functions = _functions(members)
        return (
            len({test for member in members for test in member.tests})
            <= self.settings.max_cluster_share * self.num_tests
            and len(functions) <= self.settings.max_functions
            and gold_lines(functions, self.symbols) <= self.settings.max_lines
        )

    def _nearness(self, members: Collection[Feature], other: Feature) -> tuple[int, int, int]:
        """Another file first (a cluster spans two), then calls between them, then tests that need both.

        Lying in one folder is no reason, and neither is a single test in common where there are many others.
        """
        whole = _functions(members)
        own = {*other.functions}
        calls = sum(caller in own for key in whole for caller in self.symbols.callers[key])
        calls += sum(caller in whole for key in own for caller in self.symbols.callers[key])
        tests = {test for member in members for test in member.tests}
        shared = len(tests & {*other.tests})
        if shared < self.settings.min_shared * min(len(tests), len(other.tests)):
            shared = 0
        another = not _files([other]) <= _files(members)
        return int(another and bool(calls or shared)), calls, shared


def gold_lines(functions: Iterable[FunctionKey], symbols: Symbols) -> int:
    """About as many lines as a patch adds that brings the functions' bodies back."""
    whole = set(functions)
    return sum(symbols.functions[key].body_lines for key in whole if not key.is_inside(whole))


def _can_be_target(function: Function) -> bool:
    return not (function.nested or function.dunder or function.is_declaration)


def _functions(features: Iterable[Feature]) -> set[FunctionKey]:
    return {key for feature in features for key in feature.functions}


def _files(features: Iterable[Feature]) -> set[str]:
    return {key.path for key in _functions(features)}


def _adds(members: Collection[Feature], other: Feature) -> bool:
    """Neither is part of the other."""
    whole = _functions(members)
    own = {*other.functions}
    return not own <= whole and not whole <= own
