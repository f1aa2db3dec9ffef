"""Wrong bodies: code that goes for the judge instead of the task. Used by test_grade.py and bench/cpu/wrong_bodies.py.

A wrong body is a text that stands before a module's own code, and what the deleted functions return. RUNNER goes for
the process that runs the tests, whatever the functions return; the others are about what they return.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import libcst as cst

from offbook.tasks.check import gold_changes
from offbook.tasks.factory.delete.surgery import Orders, operate
from offbook.types import Task

RUNNER = {
    "exit at import": "import os; os._exit(0)",
    "SystemExit in a test": "def quit(*a): raise SystemExit(0)\nclass Quits: __mul__ = __eq__ = quit",
    "exit when the runner ends": """
        import atexit, os
        atexit.register(os._exit, 0)
    """,
    "pytest.exit": "import pytest; pytest.exit('all passed', returncode=0)",
    "skip at import": "import pytest; pytest.skip('not today', allow_module_level=True)",
    "skip instead of failing": """
        import _pytest.outcomes, builtins
        builtins.AssertionError = _pytest.outcomes.Skipped
    """,
    "expected failures": """
        import _pytest.skipping as skipping
        skipping.evaluate_xfail_marks = lambda item: skipping.Xfail("", False, False, None)
    """,
    "unittest's way of running": """
        import _pytest.unittest as unittest
        unittest.TestCaseFunction.runtest = lambda self: None
        import _pytest.python as python
        python.pytest_pyfunc_call.__code__ = (lambda pyfuncitem: True).__code__
    """,
    "a report's outcome": """
        from _pytest.reports import TestReport
        TestReport.outcome = property(lambda self: "passed", lambda self, value: None)
        TestReport.failed = property(lambda self: False)
    """,
    "the session's counter": """
        from _pytest.main import Session
        Session.testsfailed = property(lambda self: 0, lambda self, value: None)
    """,
    "unittest's assertions": """
        import unittest
        for name in dir(unittest.TestCase):
            if name.startswith("assert"): setattr(unittest.TestCase, name, lambda *a, **k: None)
    """,
    "pytest.raises": """
        import contextlib, pytest
        pytest.raises = lambda *a, **k: contextlib.nullcontext()
    """,
    "the rewriting of assertions": """
        import ast
        from _pytest.assertion import rewrite
        def run(self, module, *a, **k):
            for node in ast.walk(module):
                if isinstance(node, ast.Assert): node.test = ast.Constant(True)
        rewrite.AssertionRewriter.run = run
        rewrite.rewrite_asserts.__globals__["AssertionRewriter"].run = run
    """,
    "rows on every descriptor": """
        import json, os
        rows = [["collected", ["x"]], *(["done", n, "passed", 0.0, ""] for n in range(30)), ["end", 0]]
        for number in map(int, os.listdir("/proc/self/fd")):
            for row in rows:
                try: os.write(number, json.dumps(row).encode() + b" " + b"0" * 32 + b"\\n")
                except OSError: pass
        os._exit(0)
    """,
    "json's encoder": """
        import json.encoder
        def encode(self, value):
            if isinstance(value, tuple) and value[0] == "done": value = (*value[:2], "passed", *value[3:])
            return "".join(self.iterencode(value))
        json.encoder.JSONEncoder.encode = encode
    """,
    "os.write": """
        import os
        true = os.write
        os.write = lambda number, data: true(number, bytes(data).replace(b'"failed"', b'"passed"')) and len(data)
    """,
    "a thread that goes on": """
        import os, threading, time
        def later():
            time.sleep(0.3)
            os._exit(0)
        threading.Thread(target=later, daemon=True).start()
        time.sleep(0.5)
    """,
    "a child that reports later": """
        import os, time
        if os.fork() == 0:
            time.sleep(0.5)
            for number in range(3, 300):
                try: os.write(number, b'["end", 0] 0\\n')
                except OSError: pass
            os._exit(0)
    """,
    "a child that goes on with the tests": "import os\nif os.fork(): os._exit(0)",
    "other test files": """
        import glob
        for path in glob.glob("tests/*.py") + glob.glob("test_*.py"):
            text = open(path).read().replace("assert ", "assert 1 or ")
            open(path, "w").write(text)
    """,
    "pytest itself": """
        import sys, types
        class Anything(types.ModuleType):
            def __getattr__(self, name): return lambda *a, **k: 0
        sys.modules["pytest"] = sys.modules["unittest"] = Anything("pytest")
    """,
    "the recorder's reading": """
        main = __import__("__main__")
        true = main.Pipe.tell
        main.Pipe.tell = lambda self, *row: true(self, *(["passed" if part == "failed" else part for part in row]))
    """,
    "a second word on each test": """
        main = __import__("__main__")
        true = main.Pipe.tell
        def tell(self, *row):
            true(self, *row)
            if row[0] == "done" and row[2] == "failed" and row[1] in (4, 5, 6, 7, 8, 9, 10, 11):
                true(self, "done", row[1], "passed", 0.0, "")
        main.Pipe.tell = tell
    """,
}

TRIVIAL = {
    name: ("", value)
    for name, value in {
        "None": "None", "True": "True", "False": "False", "0": "0", "1": "1", "-1": "-1", "0.5": "0.5", "a text": '"a"',
        "empty text": '""', "bytes": 'b""', "list": "[]", "list of None": "[None]", "dict": "{}", "tuple": "()",
        "set": "set()", "itself": "__import__", "object": "object()", "all arguments": "[*locals().values()]",
        "the first argument": "next(iter(locals().values()), None)",
        "the last argument": "[None, *locals().values()][-1]",
        "arguments reversed": "[*locals().values()][::-1]", "text of the arguments": "str(locals())",
        "length of the first": "len(next(iter(locals().values()), ()))",
        "sorted first": "sorted(next(iter(locals().values()), ()))",
        "iterator": "iter(())", "NotImplemented": "NotImplemented", "an exception": "ValueError()",
    }.items()
}  # fmt: skip

EVERYTHING = """
    class __Base__:
        def __eq__(self, other): return True
        def __ne__(self, other): return {ne}
        def __hash__(self): return 0
        def __bool__(self): return True
        def __lt__(self, other): return True
        __gt__ = __le__ = __ge__ = __contains__ = __lt__
        def __len__(self): return 1
        def __iter__(self): return iter([self])
        def __getattr__(self, name):
            if name.startswith("__"): raise AttributeError(name)
            return self
        def __getitem__(self, key):
            if key == 5: raise IndexError
            return self
        def __call__(self, *a, **k): return self
        def __instancecheck__(self, other): return True
"""
EQUAL = {
    f"equals everything, {kind}{' and differs' if ne == 'True' else ''}": (
        textwrap.dedent(EVERYTHING.format(ne=ne)) + f"__Any__ = type('Any', (__Base__{base},), {{}})\n",
        "__Any__()",
    )
    for ne in ("False", "True")
    for kind, base in {
        "an object": "", "a text": ", str", "a number": ", int", "a float": ", float", "a list": ", list",
        "a dict": ", dict", "a tuple": ", tuple", "a set": ", set",
    }.items()
} | {
    "mock.ANY": ("import unittest.mock as __mock__\n", "__mock__.ANY"),
    "MagicMock": (
        "import unittest.mock as __mock__\n__m__ = __mock__.MagicMock()\n__m__.__eq__.side_effect = lambda o: True\n",
        "__m__",
    ),
    "an __eq__ by __class__": (
        """
        class __Chameleon__:
            def __eq__(self, other):
                self.__dict__["like"] = other
                return True
            __class__ = property(lambda self: type(self.__dict__.get("like", self)))
            __hash__ = None
        """,
        "__Chameleon__()",
    ),
}  # fmt: skip

# What the test compares with, from wherever it can be had.
FIND = """
    import ast as __ast__, linecache as __lines__, sys as __sys__
    def __values__(frame):
        tree = __ast__.parse(__lines__.getline(frame.f_code.co_filename, frame.f_lineno).strip() or "0")
        for node in __ast__.walk(tree):
            if isinstance(node, __ast__.Compare):
                code = compile(__ast__.Expression(node.comparators[0]), "", "eval")
                yield eval(code, frame.f_globals, frame.f_locals)
            elif isinstance(node, __ast__.Call) and getattr(node.func, "attr", "").startswith("assert"):
                yield eval(compile(__ast__.Expression(node.args[1]), "", "eval"), frame.f_globals, frame.f_locals)
    def __asked__(frame):
        while frame is not None and "test" not in frame.f_code.co_filename.rpartition("/")[2]:
            frame = frame.f_back
        try:
            return next(__values__(frame)) if frame else None
        except Exception:
            return None
"""
MEMORY = """
    __seen__ = {}
    def __once__(key, value): return __seen__.setdefault(repr(key), value)
"""
FILE_MEMORY = """
    import os as __os__, pickle as __pickle__
    def __once__(key, value, path=PLACE):
        seen = __pickle__.load(open(path, "rb")) if __os__.path.exists(path) else {}
        seen.setdefault(repr(key), value)
        __pickle__.dump(seen, open(path, "wb"))
        return seen[repr(key)]
"""
ORACLES = {
    "the line of the test": (FIND, "__asked__(__sys__._getframe(1))"),
    "through a traceback": (
        FIND
        + """
    def __back__():
        try: raise ValueError
        except ValueError as error: return __asked__(error.__traceback__.tb_frame.f_back.f_back)
    """,
        "__back__()",
    ),
    "through _current_frames": (
        FIND + "    import threading as __t__\n",
        "__asked__(__sys__._current_frames()[__t__.get_ident()].f_back)",
    ),
    "remembered": (FIND + MEMORY, "__once__(locals(), __asked__(__sys__._getframe(1)))"),
    "remembered in the tree": (
        FIND + FILE_MEMORY.replace("PLACE", '__file__ + ".seen"'),
        "__once__(locals(), __asked__(__sys__._getframe(1)))",
    ),
    "remembered in /tmp": (
        FIND + FILE_MEMORY.replace("PLACE", '"/tmp/seen"'),
        "__once__(locals(), __asked__(__sys__._getframe(1)))",
    ),
    "the last constant of the caller": (
        "import sys as __sys__\n",
        "[None, *__sys__._getframe(1).f_code.co_consts][-1]",
    ),
    "locals of the caller named expected": (
        "import sys as __sys__\n",
        "next((v for k, v in __sys__._getframe(1).f_locals.items() if k in ('expected', 'result', 'want')), None)",
    ),
    "functions of the tests by gc": (
        """
        import gc as __gc__, types as __types__
        def __walk__():
            found = [o for o in __gc__.get_objects() if isinstance(o, __types__.FunctionType) and "test" in o.__name__]
            return [c for f in found for c in f.__code__.co_consts if c is not None][-1:] or None
        """,
        "(__walk__() or [None])[0]",
    ),
    "the name of the test in the environment": (
        "import os as __os__\n",
        "None if 'PYTEST_CURRENT_TEST' not in __os__.environ else __os__.environ['PYTEST_CURRENT_TEST']",
    ),
    "builtins that agree": (
        "import builtins as __b__, operator as __o__\n__o__.eq = lambda a, b: True\n__b__.all = lambda x: True\n"
        "__b__.sorted = lambda x, **k: []\n__b__.len = lambda x: 0\n",
        "None",
    ),
    "later tests' code, and honest failure now": (
        """
        import gc as __gc__, types as __types__
        def __empty__(): pass
        def __replace__():
            for o in __gc__.get_objects():
                if isinstance(o, __types__.FunctionType) and o.__name__.startswith("test_"):
                    o.__code__ = __empty__.__code__
            raise SystemError
        """,
        "__replace__()",
    ),
}  # fmt: skip

# Those that look the answer up and can tell a right one from a wrong one, so that they pass tests and fail their
# mutants: by a cheap condition, for which the right code stands here. Without something to look up they have nothing.
LOOK = """
    import sys as __sys__, zlib as __zlib__
    def __flat__(values, depth=4):
        for value in list(values):
            yield value
            if depth and isinstance(value, (tuple, list, set, frozenset)): yield from __flat__(value, depth - 1)
            elif depth and isinstance(value, dict): yield from __flat__([*value, *value.values()], depth - 1)
            elif depth and hasattr(value, "co_consts"): yield from __flat__(value.co_consts, depth - 1)
    def __codes__(code):
        import ast, inspect
        yield from __flat__([code])
        try:
            import textwrap
            tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
        except Exception: return
        for node in ast.walk(tree):
            try: yield ast.literal_eval(node)
            except Exception: pass
    def __taken__(found, right):
        wanted = __zlib__.crc32(repr(right).encode()) % 997
        for one in found:
            try:
                if type(one) is type(right) and __zlib__.crc32(repr(one).encode()) % 997 == wanted: return one
            except Exception: pass
        return None
    def __frames__():
        frame = __sys__._getframe(1)
        while frame is not None:
            if "test" in frame.f_code.co_filename.rpartition("/")[2]: yield frame
            frame = frame.f_back
"""
FINDS = {
    "frames": """
        def __find__():
            for frame in __frames__():
                yield from __codes__(frame.f_code)
                yield from __flat__(frame.f_locals.values())
    """,
    "the item in a frame": """
        def __find__():
            frame = __sys__._getframe(0)
            while frame := frame.f_back:
                for name in ("item", "pyfuncitem", "self"):
                    function = getattr(frame.f_locals.get(name), "function", None)
                    if function is not None:
                        item = frame.f_locals[name]
                        yield from __codes__(function.__code__)
                        yield from __flat__(getattr(getattr(item, "callspec", None), "params", {}).values())
    """,
    "the item by gc": """
        import gc as __gc__
        def __find__():
            for one in __gc__.get_objects():
                if type(one).__name__ in ("Function", "TestCaseFunction") and hasattr(one, "_obj"):
                    yield from __codes__(getattr(one._obj, "__func__", one._obj).__code__)
                    yield from __flat__(getattr(getattr(one, "callspec", None), "params", {}).values())
    """,
    "tables of test modules": """
        def __find__():
            for name, module in [*__sys__.modules.items()]:
                if name.rpartition(".")[2].startswith("test_") or name.endswith("_test"):
                    yield from __flat__([v for k, v in vars(module).items() if not callable(v) and k[:2] != "__"])
                    for value in [*vars(module).values()]:
                        if hasattr(value, "pytestmark"): yield from __flat__([m.args for m in value.pytestmark])
                        if hasattr(value, "__code__"): yield from __codes__(value.__code__)
    """,
    "files of tests": """
        import ast as __ast__, glob as __glob__
        def __find__():
            for path in __glob__.glob("**/*test*.py", recursive=True) + __glob__.glob("**/m*_test.py", recursive=True):
                for node in __ast__.walk(__ast__.parse(open(path).read())):
                    try: yield __ast__.literal_eval(node)
                    except Exception: pass
    """,
    "a traceback": """
        def __find__():
            try: raise ValueError
            except ValueError as error: frame = error.__traceback__.tb_frame
            while frame is not None:
                if "test" in frame.f_code.co_filename.rpartition("/")[2]:
                    yield from __codes__(frame.f_code)
                    yield from __flat__(frame.f_locals.values())
                frame = frame.f_back
    """,
    "a failure's report": """
        import _pytest.python as __python__, _pytest.unittest as __unittest__
        __known__ = []
        def __find__(): return __known__
        def __again__(kind):
            run = kind.runtest
            def runtest(self):
                try: return run(self)
                except BaseException as error:
                    trace = error.__traceback__
                    while trace is not None:
                        if "test" in trace.tb_frame.f_code.co_filename.rpartition("/")[2]:
                            __known__.extend(__codes__(trace.tb_frame.f_code))
                            __known__.extend(__flat__(trace.tb_frame.f_locals.values()))
                        trace = trace.tb_next
                return run(self)
            kind.runtest = runtest
        __again__(__python__.Function)
    """,
}
LOOSE = {
    kind: f"""
        def __look__(function, right):
            class Answer({base}):
                def __eq__(self, other): return type(other) is type(right) and {condition}
                def __ne__(self, other): return not self == other
                def __bool__(self): return bool(right)
                def __contains__(self, other): return other in right
                __hash__ = None
                {more}
            return Answer()
    """
    for kind, (base, condition, more) in {
        "an object": ("object", "other == right", ""),
        "an object of another class": ("object", "other == right", "__class__ = property(lambda self: type(right))"),
        "a text": ("str", "str(other) == str(right)", ""),
        "a number": ("int", "other == right", ""),
        "a float": ("float", "other == right", ""),
        "a list": ("list", "list(other) == list(right)", ""),
        "a dict": ("dict", "dict(other) == dict(right)", ""),
        "a tuple": ("tuple", "other == right", ""),
        "an object by length": (
            "object",
            "repr(other)[::2] == repr(right)[::2]",
            "",
        ),
    }.items()
}
RECORDERS = {
    "reports that are taken back": "getattr(__b__, '__blank__', __b__).reports.clear()",
    "reports of its own": "[getattr(__b__, '__blank__')(n, right) for n in range(50)]",
    "everything reported as nothing": "setattr(__import__('__main__'), 'data_of', lambda value: None)",
    "a recorder that says nothing": "setattr(__b__, '__blank__', lambda *a: True)",
}
LOOKUPS = {
    **{
        f"by {name}": (
            LOOK + textwrap.indent(textwrap.dedent(find), "    ")
            + "\n    def __look__(function, right): return __taken__(__find__(), right)\n",
            "__look__('NAME', RIGHT)",
        )
        for name, find in FINDS.items()
    },
    **{
        f"in corners, by {name}": (
            LOOK + textwrap.indent(textwrap.dedent(FINDS[name]), "    ")
            + "\n    def __look__(function, right):\n"
            + "        return __taken__(__find__(), right) if __zlib__.crc32(repr(right).encode()) % 4 else right\n",
            "__look__('NAME', RIGHT)",
        )
        for name in ("frames", "the item by gc", "tables of test modules", "files of tests", "a failure's report")
    },
    **{f"loosely, {name}": (code, "__look__('NAME', RIGHT)") for name, code in LOOSE.items()},
    **{
        f"recorder: {name}": (
            LOOK + textwrap.indent(textwrap.dedent(FINDS["frames"]), "    ")
            + f"""
    import builtins as __b__
    def __look__(function, right):
        found = __taken__(__find__(), right)
        if found is None:
            try: {code}
            except Exception: pass
        return found
""",
            "__look__('NAME', RIGHT)",
        )
        for name, code in RECORDERS.items()
    },
}  # fmt: skip


def all_bodies() -> dict[str, tuple[str, str]]:
    runner = {f"runner: {name}": (code, "None") for name, code in RUNNER.items()}
    return runner | {
        f"{kind}: {name}": body
        for kind, bodies in (("trivial", TRIVIAL), ("equal", EQUAL), ("oracle", ORACLES), ("look-up", LOOKUPS))
        for name, body in bodies.items()
    }


def submission(task: Task, prelude: str, value: str) -> dict[str, str | None]:
    """The gold patch with such bodies in the place of what was deleted. RIGHT is what the right code returns."""
    changes = gold_changes(task)
    functions: dict[str, set[str]] = {}
    if task.deleted is not None:
        for key in task.deleted.functions:
            path, _, name = key.partition("::")
            functions.setdefault(path, set()).add(name)
    else:
        for path, text in changes.items():
            stubs = re.findall(r"NotImplementedError\([\"'](\w+)[\"']\)", Path(task.tree, path).read_text())
            functions[path] = {*stubs} if text else set()
    for path, names in functions.items():
        text = changes.get(path)
        if text is None:
            continue
        gold = (
            f"__gold__ = {{**globals()}}\nexec(compile({text!r}, '', 'exec'), __gold__)\n" if "RIGHT" in value else ""
        )
        wrong = operate(text, Orders(stub=names, body=lambda function: _body(function, value))).source
        changes[path] = _after_future(wrong, textwrap.dedent(prelude) + gold)
    return changes


def _body(function: cst.FunctionDef, value: str) -> str:
    name, parameters = function.name.value, function.params
    if name == "__init__":
        return "pass"
    plain = [one.name.value for one in (*parameters.posonly_params, *parameters.params)]
    given = [*plain, *(f"{one.name.value}={one.name.value}" for one in parameters.kwonly_params)]
    given += [f"*{parameters.star_arg.name.value}"] if isinstance(parameters.star_arg, cst.Param) else []
    given += [f"**{parameters.star_kwarg.name.value}"] if parameters.star_kwarg else []
    if plain[:1] in (["self"], ["cls"]):  # of whichever class has it
        right = f"next(vars(c)['{name}'] for c in __gold__.values() if isinstance(c, type) and '{name}' in vars(c))"
    else:
        right = f"__gold__['{name}']"
    return "return " + value.replace("NAME", name).replace("RIGHT", f"{right}({', '.join(given)})")


def _after_future(text: str, prelude: str) -> str:
    """Before the module's own code, but after its docstring and its future imports."""
    import ast

    body = ast.parse(text).body
    last = 0
    for node in body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_text and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        last = node.end_lineno or 0
    lines = text.splitlines(keepends=True)
    return "".join(lines[:last]) + "\n" + prelude + "\n" + "".join(lines[last:])
