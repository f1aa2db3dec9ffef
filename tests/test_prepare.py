"""Preparation: which tests are relied on, what the tested code can see, and one sentence for every bad repository."""

from __future__ import annotations

import asyncio
import base64
import compileall
import hashlib
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from conftest import made_once

from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.prepare import dependencies
from offbook.tasks.factory.prepare.dependencies import find_interpreter, install
from offbook.tasks.factory.prepare.metadata import Project, find_layout, read_project
from offbook.tasks.factory.prepare.prepare import PrepareSettings, load_repository, prepare
from offbook.tasks.factory.prepare.tests import BaselineLimits, timed_tests
from offbook.tasks.factory.types import Repository, Unprepared
from offbook.tasks.suite import Round, make_interpreter, run_rounds, suite_sandbox
from offbook.tasks.unpack import SourceLimits
from offbook.types import OffbookError

BOX = SandboxSpec()
LIMITS = PrepareSettings(SourceLimits(files=200), BaselineLimits(suite_s=60.0, per_test_s=2.0, min_tests=10))
RUNNER = ("pytest", "pluggy", "iniconfig", "packaging", "pygments", "hypothesis", "sortedcontainers", "pytest-timeout")
TEN = "import pytest, pkg\n@pytest.mark.parametrize('n', range(10))\ndef test_ten(n): assert pkg.double(n) == 2 * n\n"
GOOD = {"pkg/__init__.py": "def double(n): return 2 * n\n", "tests/test_pkg.py": TEN}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return folder


def make_wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> None:
    """What an installed distribution was installed from, or something small of our own."""
    info = f"{name}-{version}.dist-info"
    files = {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(), **files}
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for path, data in files.items()
    ]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)


def installed_files(name: str) -> tuple[str, str, dict[str, bytes]]:
    distribution = importlib.metadata.distribution(name)
    files = {}
    for file in distribution.files or []:
        path = Path(str(distribution.locate_file(file)))
        if ".." not in file.parts and "__pycache__" not in file.parts and path.is_file():
            files[str(file)] = path.read_bytes()
    info = next(path for path in files if path.endswith(".dist-info/METADATA"))
    return info.split("-")[0], distribution.version, files


def lay_out(
    shared: Path, folder: Path, names: Iterable[str], wanted: Callable[[str], bool] = lambda path: True
) -> Path:
    """These packages in the folder, as pip would install them.

    A copy, although it is only read: a link made to a file, by whatever runs beside a test, looks like a write to it.
    """

    def make(place: Path) -> None:
        for name in names:
            for path, data in installed_files(name)[2].items():
                if wanted(path):
                    (place / path).parent.mkdir(parents=True, exist_ok=True)
                    (place / path).write_bytes(data)
        compileall.compile_dir(place, quiet=2)

    return shutil.copytree(made_once(shared / folder.name, make), folder)


@pytest.fixture(scope="session")
def deps(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runner."""
    return lay_out(shared, tmp_path_factory.mktemp("deps") / "runner", RUNNER)


def installed(deps: Path, folder: Path) -> Path:
    """A folder in which the dependencies are there already, as after an interrupted preparation."""
    folder.mkdir(parents=True)
    shutil.copytree(deps, folder / "deps", copy_function=os.link)
    make_interpreter(folder, Path(os.path.realpath(sys.executable)))
    (folder / "dependencies.json").write_text('{"left_out": []}')
    return folder


def ready(repo: Path, folder: Path, settings: PrepareSettings = LIMITS) -> Repository:
    return asyncio.run(prepare(str(repo), folder, BOX, settings=settings))


def refused(repo: Path, folder: Path, settings: PrepareSettings = LIMITS) -> str:
    with pytest.raises(Unprepared) as error:
        ready(repo, folder, settings)
    assert "\n" not in str(error.value)
    left = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    assert left in ([], ["prepare.log"])
    return str(error.value)


# --- the whole way


def test_from_a_folder_to_a_repository_and_not_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in RUNNER:
        make_wheel(wheels, *installed_files(name))
    make_wheel(wheels, "helper", "3.1", {"helper/__init__.py": b"VALUE = 5\n"})
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    repo = write(
        tmp_path / "repo",
        {
            "pyproject.toml": """
                [project]
                name = "My-Pkg"
                version = "1.5"
                dependencies = ["helper>=3; python_version >= '3'", "not-for-this; python_version < '3'"]
                optional-dependencies = {test = ["no-wheel-of-this", "mypy", "my-pkg[more]"], more = ["pytest-timeout"]}
                [project.entry-points.things]
                one = "my_pkg:double"
                [tool.pytest.ini_options]
                addopts = "--cov=my_pkg --import-mode=importlib -n 4"
                python_files = ["check_*.py"]
            """,
            "setup.py": f"open({str(tmp_path / 'ran')!r}, 'w')\n",
            "src/my_pkg/__init__.py": "import helper\ndef double(n): return 2 * n\n",
            "src/my_pkg.egg-info/PKG-INFO": "Name: My-Pkg\n",
            "tests/check_it.py": """
                import importlib.metadata, pytest, my_pkg, helper
                @pytest.mark.parametrize("n", range(10))
                def test_double(n): assert my_pkg.double(n) == 2 * n
                def test_metadata():
                    assert importlib.metadata.version("my-pkg") == "1.5"
                    (point,) = importlib.metadata.entry_points(group="things")
                    assert point.load() is my_pkg.double
                    assert helper.VALUE == 5
            """,
            "tests/data/words.txt": "a b c",
        },
    )
    folder, told = tmp_path / "made", list[str]()
    repository = asyncio.run(prepare(str(repo), folder, BOX, told.append, LIMITS))
    assert (repository.name, repository.version, repository.import_roots) == ("My-Pkg", "1.5", ("src",))
    assert repository.source_files == ("src/my_pkg/__init__.py",)
    assert repository.test_files == ("tests/check_it.py",)
    assert repository.support_files == ("tests/data/words.txt",)
    assert len(repository.tests) == 11
    assert set(repository.seconds) == set(repository.tests)
    assert not repository.excluded
    assert repository.pytest_options == ("-c", "pyproject.toml", "--import-mode=importlib")
    assert not list(repository.tree.rglob("*.egg-info"))
    assert not list(repository.tree.rglob("__pycache__"))
    assert not (tmp_path / "ran").exists()
    assert "My-Pkg: no wheels for no-wheel-of-this" in told
    assert not (repository.deps / "mypy").exists()
    assert list(repository.deps.glob("helper/__pycache__/*.pyc"))

    shutil.rmtree(wheels)
    shutil.rmtree(repo)
    told.clear()
    assert asyncio.run(prepare(str(repo), folder, BOX, told.append, LIMITS)) == repository
    assert told == []
    moved = folder.rename(tmp_path / "moved")
    assert load_repository(moved).tree == moved / "tree"


def test_a_copy_of_the_package_among_its_dependencies_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the runner depends on the package, as it may on any small library."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("pytest", "hypothesis", "pytest-timeout"):
        needs = "Metadata-Version: 2.1\nName: {}\nVersion: 1\nRequires-Dist: pkg\n".format(name.replace("-", "_"))
        short = name.replace("-", "_")
        make_wheel(wheels, short, "1", {f"{short}-1.dist-info/METADATA": needs.encode(), f"{short}.py": b""})
    make_wheel(wheels, "pkg", "9", {"pkg/__init__.py": b"", "pkg/deep/own.py": b"", "pkg_data.txt": b""})
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    deps = tmp_path / "deps"
    base = Path(os.path.realpath(sys.executable))
    assert asyncio.run(install(Project("PKG", "2"), deps, base)) == ()
    names = {path.name for path in deps.iterdir()} - {"__pycache__"}
    runner = ("pytest", "hypothesis", "pytest_timeout")
    assert names == {f"{one}{end}" for one in runner for end in (".py", "-1.dist-info")} | {"pkg-2.dist-info"}
    make_wheel(wheels, "pkg", "9", {"pkg/data": os.urandom(2 << 20)})
    monkeypatch.setattr(dependencies, "LIMIT_MB", 0)
    with pytest.raises(Unprepared, match="take 2 MB, more than 0"):
        asyncio.run(install(Project("other", "2"), deps, base))


# --- which tests are relied on, and what they can see


def test_tests_that_look_at_a_clock_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "import time\nfrom timeit import timeit\n\n"
        "def test_growth():\n    began = time.perf_counter()\n    assert time.perf_counter() - began < 2\n\n"
        "def test_plain():\n    assert True\n\n"
        "class TestIt:\n    def test_speed(self):\n        assert timeit('1') < 9\n"
    )
    names = ["test_growth", "test_plain", "TestIt::test_speed", "test_growth[1]"]
    found = timed_tests(tmp_path, [f"test_a.py::{name}" for name in names])
    assert found == {"test_a.py::test_growth", "test_a.py::TestIt::test_speed", "test_a.py::test_growth[1]"}


def test_unreliable_tests_are_left_out_with_the_reason(deps: Path, tmp_path: Path) -> None:
    files = {
        "tests/test_odd.py": """
            import os, time, unittest, pytest, pkg
            def test_fails(): assert pkg.double(1) == 3
            @pytest.fixture
            def broken(): raise ValueError("no")
            def test_broken(broken): pass
            @pytest.fixture
            def untidy():
                yield
                raise ValueError("late")
            def test_untidy(untidy): pass
            @pytest.mark.skip(reason="not today")
            def test_skipped(): pass
            @pytest.mark.xfail
            def test_expected(): assert False
            @pytest.mark.xfail
            def test_unexpected(): pass
            def test_hash(): assert hash("a") % 8 == int(os.environ["FIRST"])
            def test_endless():
                while True: pass
            def test_kills(): os._exit(0)
            @pytest.mark.parametrize("n", [object()], ids=[str(time.time())])
            def test_unnamed(n): pass
            class TestOld(unittest.TestCase):
                def test_fine(self): self.assertEqual(pkg.double(2), 4)
        """,
        "tests/test_unimportable.py": "import no_such_module\n",
        "tests/test_quiet.py": "def helper(): pass\n",
        # What the hash of "a" is under the first seed that the baseline uses.
        "conftest.py": f"import os\nos.environ['FIRST'] = '{_hash_under_seed_zero()}'\n",
    }
    repository = ready(write(tmp_path / "repo", GOOD | files), installed(deps, tmp_path / "made"))
    kept = {test.partition("[")[0] for test in repository.tests}
    assert kept == {"tests/test_pkg.py::test_ten", "tests/test_odd.py::TestOld::test_fine"}
    assert len(repository.tests) == 11
    start = "tests/test_odd.py::test_"
    reasons = {test.removeprefix(start).partition("[")[0]: reason for test, reason in repository.excluded.items()}
    assert reasons == {
        "fails": "fails in call: def test_fails(): assert pkg.double(1) == 3",
        "broken": "fails in setup: ValueError: no",
        "untidy": "fails in teardown: ValueError: late",
        "skipped": "skipped: not today",
        "expected": "skipped: def test_expected(): assert False",
        "unexpected": "skipped: passes against expectation",
        "hash": reasons["hash"],
        "endless": "fails in call: Failed: Timeout (>2.0s) from pytest-timeout.",
        "kills": "ends the test process",
        "unnamed": reasons["unnamed"],
        "tests/test_unimportable.py": "cannot be collected: ModuleNotFoundError: No module named 'no_such_module'",
    }
    assert reasons["hash"].startswith("flickers: in run ")
    assert reasons["unnamed"] in ("not collected", "flickers: in run 2 not collected")
    assert repository.test_files == ("tests/test_odd.py", "tests/test_pkg.py")
    assert {"conftest.py", "tests/test_quiet.py", "tests/test_unimportable.py"} <= set(repository.support_files)


def _hash_under_seed_zero() -> str:
    command = [sys.executable, "-c", "print(hash('a') % 8)"]
    return subprocess.run(
        command, env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_tested_code_sees_its_dependencies_and_no_more(deps: Path, tmp_path: Path) -> None:
    """The repository's own tests say so: each of them has to be kept. They are hostile, too."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        files = {
            "conftest.py": f"""
                import pathlib
                for path in ({str(tmp_path / "harm")!r}, "/app/../harm"):
                    try: pathlib.Path(path).write_text("x")
                    except OSError: pass
                import json, sys
            """,
            "json.py": "raise SystemExit('this is no part of the standard library')\n",
            "tests/__init__.py": "",
            "tests/test_inside.py": f"""
                import os, pathlib, socket, stat, subprocess, sys, pytest
                def pipe(number):
                    try: return stat.S_ISFIFO(os.fstat(number).st_mode)
                    except OSError: return False
                def child(code): return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode
                @pytest.mark.parametrize("name", ["offbook", "torch", "numpy", "pip", "_pytest_nothing"])
                def test_not_importable(name):
                    with pytest.raises(ImportError): __import__(name)
                    assert child(f"import {{name}}") == 1
                def test_importable_in_children(): assert child("import pkg, sortedcontainers") == 0
                def test_own_files():
                    import pkg
                    assert pkg.__file__ == os.path.join(os.getcwd(), "pkg", "__init__.py")
                def test_no_network():
                    with pytest.raises(OSError): socket.create_connection(("127.0.0.1", {port}), 1)
                def test_no_report_pipe():
                    opened = [int(number) for number in os.listdir("/proc/self/fd") if int(number) < 200]
                    assert len({{os.fstat(number).st_ino for number in opened if pipe(number)}}) == 1  # the output
                    assert child("import os; exit(max(map(int, os.listdir('/proc/self/fd'))) > 3)") == 0
                def test_nothing_of_the_order(): assert not [name for name in os.listdir() if "offbook" in name]
                def test_no_bytecode(): assert not list(pathlib.Path().rglob("__pycache__"))
                def test_dependencies_stay():
                    with pytest.raises(OSError): open(pytest.__file__, "a")
                    assert not os.path.exists({str(tmp_path / "repo")!r})
                def test_forks():
                    if os.fork() == 0: raise SystemExit
                    os.wait()
            """,
            "tests/test_hypothesis.py": """
                from hypothesis import given, settings, strategies as st
                @given(st.integers())
                def test_unattended(n):
                    assert settings().database is None and settings().deadline is None
            """,
        }
        repository = ready(write(tmp_path / "repo", GOOD | files), installed(deps, tmp_path / "made"))
    assert repository.excluded == {}
    assert len(repository.tests) == 10 + 5 + 8 + 1
    assert "--hypothesis-seed=0" in repository.pytest_options
    assert not (tmp_path / "harm").exists()
    assert files["json.py"] == (repository.tree / "json.py").read_text()
    assert not list(repository.tree.rglob(".offbook-*"))

    async def part() -> None:
        chosen = ["tests/test_pkg.py::test_ten[3]", "tests/test_inside.py::test_own_files", "tests/test_pkg.py::none"]
        async with await suite_sandbox(repository.tree, repository.suite, BOX) as sandbox:
            (run,) = await run_rounds(sandbox, repository.suite, [Round(repository.test_files, chosen)], 60.0)
            assert await sandbox.changes() == {}
        assert run.passed == set(chosen[:2]) == set(run.collected)
        assert (run.failed, run.skipped, run.broken, run.running, run.exit_code, run.timed_out) == (
            {},
            {},
            {},
            None,
            0,
            False,
        )

    asyncio.run(part())


def test_a_test_that_cannot_be_stopped(deps: Path, tmp_path: Path) -> None:
    stuck = """
        import time
        def test_stuck():
            while True:
                try: time.sleep(60)
                except BaseException: pass
        def test_after(): pass
    """
    limits = PrepareSettings(baseline=BaselineLimits(suite_s=8.0, per_test_s=1.0))
    repo = write(tmp_path / "repo", GOOD | {"tests/test_a.py": stuck})
    repository = ready(repo, installed(deps, tmp_path / "made"), limits)
    assert repository.excluded == {"tests/test_a.py::test_stuck": "does not end"}
    assert len(repository.tests) == 11


def test_warnings_as_errors_and_equal_names_are_tried_another_way(deps: Path, tmp_path: Path) -> None:
    files = GOOD | {
        "pytest.ini": "[pytest]\nfilterwarnings = error\n",
        "pkg/__init__.py": "import warnings\ndef double(n):\n    warnings.warn('old')\n    return 2 * n\n",
    }
    repository = ready(write(tmp_path / "repo", files), installed(deps, tmp_path / "made"))
    assert repository.pytest_options == ("-c", "pytest.ini", "-o", "filterwarnings=")
    assert len(repository.tests) == 10
    twice = GOOD | {"a/test_pkg.py": TEN, "b/test_pkg.py": TEN}
    repository = ready(write(tmp_path / "twice", twice), installed(deps, tmp_path / "made-twice"))
    assert repository.pytest_options == ("-c", "/dev/null", "--import-mode=importlib")
    assert len(repository.tests) == 30


# --- repositories that cannot be prepared


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"README": "nothing"}, "repo has no Python package or module"),
        ({"pkg/__init__.py": ""}, "repo has no test files"),
        ({"tests/test_x.py": "def test(): pass"}, "repo has no Python package or module"),
        (
            GOOD | {"pyproject.toml": "[project"},
            "its pyproject.toml cannot be read (Expected ']' at the end of a table",
        ),
        (
            GOOD | {"pyproject.toml": "[project]\nname='pkg'\nrequires-python='>=99'"},
            "pkg needs Python >=99 and this is 3.",
        ),
        (
            GOOD | {"pyproject.toml": "[project]\nname='Pluggy'"},
            "Pluggy comes with the test runner, which would run on the code that is deleted",
        ),
        ({f"{number}.py": "" for number in range(201)}, "holds more than 200 files"),
        (GOOD | {"pyproject.toml": "[project]\nname='/some/where'"}, "name is invalid: '/some/where'"),
        (GOOD | {"pyproject.toml": "[project]\nname='pkg'\nversion='1/../../x'"}, "Invalid version: '1/../../x'"),
        (
            GOOD | {"pyproject.toml": "[project]\nname='pkg'\n[tool.setuptools_scm]\nwrite_to='../version.py'"},
            "'../version.py' is no path inside",
        ),
    ],
)
def test_refused_before_anything_runs(files: dict[str, str], sentence: str, tmp_path: Path) -> None:
    assert sentence in refused(write(tmp_path / "repo", files), tmp_path / "made")


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (GOOD | {"pkg/__init__.py": "def x(:"}, "the tests of repo cannot be imported ("),
        (
            GOOD | {"pkg/__init__.py": "import elsewhere.part", "pkg/_speed.c": ""},
            "the tests of repo cannot be imported (ModuleNotFoundError: No module named 'elsewhere')",
        ),
        (
            GOOD | {"tests/test_pkg.py": "import nothing"},
            "the tests of repo cannot be imported (ModuleNotFoundError: No",
        ),
        (GOOD | {"tests/test_pkg.py": "x = 1"}, "repo has no tests that pytest finds"),
        (GOOD | {"conftest.py": "raise ValueError('no')"}, "the tests of repo cannot be run (ValueError: no)"),
        (GOOD | {"conftest.py": "import os\nos._exit(3)"}, "the tests of repo cannot be run (no output)"),
        (
            GOOD | {"pkg/__init__.py": "def double(n): return 2 * n if n else 1"},
            "repo has 9 reliable tests and at least 10 are needed; most often: fails in call: def test_ten(n)",
        ),
    ],
)
def test_refused_after_a_look_in_the_sandbox(files: dict[str, str], sentence: str, deps: Path, tmp_path: Path) -> None:
    folder = installed(deps, tmp_path / "made")
    said = refused(write(tmp_path / "repo", files), folder)
    assert said.startswith(sentence)
    assert said in (folder / "prepare.log").read_text()


def test_what_never_ends_is_refused(deps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forever = "while True: pass\n"
    short = PrepareSettings(LIMITS.source, BaselineLimits(suite_s=300.0, per_test_s=2.0, collect_s=3.0, min_tests=10))
    repo, began = write(tmp_path / "repo", GOOD | {"conftest.py": forever}), time.monotonic()
    sentence = "the tests of repo cannot be imported within 3 s"
    assert refused(repo, installed(deps, tmp_path / "a"), short) == sentence
    assert time.monotonic() - began < 60  # and not until the limit for all of them
    monkeypatch.setattr("offbook.tasks.suite.START_S", 1.0)
    started = PrepareSettings(LIMITS.source, LIMITS.baseline, start="sleep 9")
    repo = write(tmp_path / "third", GOOD)
    sentence = "the start command `sleep 9` did not end within 1 s"
    assert refused(repo, installed(deps, tmp_path / "c"), started) == sentence


# --- another interpreter


def test_where_an_interpreter_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = asyncio.run(find_interpreter())
    major, minor, _ = own.version.split(".", 2)
    assert own.path == Path(os.path.realpath(sys.executable))
    assert asyncio.run(find_interpreter(sys.executable)).version == own.version
    (tmp_path / f"python{major}.{minor}").symlink_to(own.path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = asyncio.run(find_interpreter(f"{major}.{minor}"))
    assert (found.path, found.version) == (own.path, own.version)
    for wanted, command in (("3.99", "python3.99"), ("/bin/true", "/bin/true"), ("nowhere/python", "nowhere/python")):
        with pytest.raises(OffbookError, match=f"{command} is no Python interpreter: install it"):
            asyncio.run(find_interpreter(wanted))


# --- what a repository says of itself


@pytest.mark.parametrize(
    ("files", "needs", "test_needs"),
    [
        (
            {"PKG-INFO": "Name: p\nVersion: 2\nRequires-Dist: a>1\nRequires-Dist: b; python_version<'3'\n"
             "Requires-Dist: e; python_version>'3'\nRequires-Dist: c; extra == 'tests'\n"
             "Requires-Dist: f; python_version > '3' and extra == 'tests'\n"
             "Requires-Dist: d; extra == 'docs'\nProvides-Extra: tests\n"
             "Provides-Extra: docs\n\nRequires-Dist: not this\n"},
            ["a>1", 'b; python_version < "3"', 'e; python_version > "3"'],
            ["c", 'f; python_version > "3"'],
        ),
        (
            {"p.egg-info/PKG-INFO": "Name: p\n",
             "p.egg-info/requires.txt": "a\n\n[test]\nb\n\n[:python_version<'3']\nc\n"},
            ["a", 'c; python_version < "3"'],
            ["b"],
        ),
        ({"pyproject.toml": "[project]\nname='p'\ndependencies=['a']\n[dependency-groups]\n"
          "x=['b', {include-group='y'}]\ny=['d']\n"
          "test=[{include-group='x'}, 'c', 'ruff', 'pytest-cov']"}, ["a"], ["b", "d", "c"]),
        ({"pyproject.toml": "[project]\nname='p'\noptional-dependencies={dev=['p[test]','d'],test=['t']}"}, [], ["t"]),
        ({"pyproject.toml": "[project]\nname='p'\noptional-dependencies={dev=['p[x]','d'],x=['y']}"}, [], ["y", "d"]),
        ({"pyproject.toml": "[tool.poetry]\nname='p'\n[tool.poetry.dependencies]\npython='^3'\na='^1'\n"
          "[tool.poetry.group.dev.dependencies]\nc='*'"}, ["a"], ["c"]),
        ({"setup.cfg": "not an ini file", "setup.py": "def (", "PKG-INFO": "\n"}, [], []),
    ],
)  # fmt: skip
def test_metadata(files: dict[str, str], needs: list[str], test_needs: list[str], tmp_path: Path) -> None:
    project = read_project(write(tmp_path, files), "p", "")
    assert (project.name, project.needs, project.test_needs) == ("p", needs, test_needs)


@pytest.mark.parametrize(
    ("name", "files", "root", "sources", "tests"),
    [
        ("p", ["p.py", "test_p.py", "setup.py"], ".", ["p.py"], ["test_p.py"]),
        ("P-q", ["p_q/a.py", "p_q/__init__.py", "p_q/tests/test_a.py", "tools/__init__.py"], ".",
         ["p_q/__init__.py", "p_q/a.py"], ["p_q/tests/test_a.py"]),
        ("other", ["src/x/__init__.py", "x/__init__.py", "tests/x_test.py"], "src",
         ["src/x/__init__.py"], ["tests/x_test.py"]),
        ("n.s", ["n/s/__init__.py", "tests/test_a.py", "docs/test_b.py"], ".",
         ["n/s/__init__.py"], ["tests/test_a.py"]),
        ("python-p", ["p/__init__.py", "q/__init__.py", "tests/test_a.py"], ".",
         ["p/__init__.py"], ["tests/test_a.py"]),
    ],
)  # fmt: skip
def test_layout(name: str, files: list[str], root: str, sources: list[str], tests: list[str], tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(files, "import unittest\n"))
    layout = find_layout(tmp_path, read_project(tmp_path, name, ""))
    assert (layout.import_roots, list(layout.source_files), list(layout.test_files)) == ((root,), sources, tests)


def test_settings_of_pytest(tmp_path: Path) -> None:
    options = "-p plugin -p no:x --lf -W error -m 'not slow' --ignore=x"
    settings = f"[pytest]\ntestpaths = checks ../.. /etc\npython_files = check_*.py\naddopts = {options}"
    write(
        tmp_path, {"tox.ini": settings, "p.py": "", "checks/check_a.py": "", "check_b.py": "", "checks/test_c.py": ""}
    )
    layout = find_layout(tmp_path, read_project(tmp_path, "p", ""))
    assert layout.test_files == ("check_b.py", "checks/check_a.py")
    assert layout.pytest_options == ("-c", "tox.ini", "--ignore=x")


def test_a_version_file_that_building_would_write(deps: Path, tmp_path: Path) -> None:
    files = GOOD | {
        "pyproject.toml": "[project]\nname='pkg'\nversion='4.2'\n[tool.setuptools_scm]\nversion_file='pkg/_version.py'",
        "pkg/__init__.py": "from pkg._version import version, version_tuple\ndef double(n): return 2 * n\n",
    }
    repository = ready(write(tmp_path / "repo", files), installed(deps, tmp_path / "made"))
    assert len(repository.tests) == 10
    assert json.loads((tmp_path / "made" / "source.json").read_text())["project"]["version"] == "4.2"
