"""offbook view: runs as a page to look at."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from offbook.cli.options import argument, option
from offbook.types import OffbookError

if TYPE_CHECKING:
    from offbook.view.index import RunIndex

KEYS = ("invalid_per_100", "solved")
MAX_OTHERS = 3  # runs next to the first; more of them are read in a table


def view(
    runs: Annotated[list[Path], argument("Run folders, or a folder of them; several are compared.")],
    static: Annotated[Path | None, option("Write the page as one file that can be mailed.")] = None,
    port: Annotated[int, option("Of the local server; 0 is any that is free.", min=0, max=65535)] = 8620,
    open_browser: Annotated[bool, option("Open the page in a browser.", "--open")] = False,
) -> None:
    """Look at runs, also while they are going on: a page on this machine alone, until Ctrl-C.

    For example: offbook view runs/train
    """
    from offbook.view.index import RunIndex

    found = [RunIndex(name, path) for name, path in _folders(runs).items()]
    if static:
        write_page(static, found, " / ".join(run.name for run in found))
        print(static)
    else:
        _serve(found, port, open_browser)


def write_page(out: Path, runs: list[RunIndex], title: str, next_steps: dict[str, Any] | None = None) -> None:
    from offbook.view.single import write_single

    write_single(out, runs, title, outcome, next_steps=next_steps)


def _folders(given: list[Path]) -> dict[str, Path]:
    """Runs by name. A folder with runs or cycles in it stands for them, and for the measurement before them."""
    from offbook.core.runfolder import RunFolder

    folders: dict[str, Path] = {}

    def add(path: Path, last: str) -> None:
        real = path.resolve()
        name = last if last not in folders else f"{real.parent.name}/{last}"
        folders[name if name not in folders else str(real)] = real

    for path in given:
        inner = sorted(child.parent for child in path.glob("*/config.toml"))
        cycles = [child.parent for child in (*path.glob("decisions.jsonl"), *path.glob("*/decisions.jsonl"))]
        if cycles:
            inner = [each for cycle in cycles for each in (cycle, *sorted(cycle.glob("cycles/*")))]
        elif (path / "config.toml").is_file():
            inner = []
        for run in inner or [path]:
            add(RunFolder.open(run).path, run.resolve().name)
        if inner and (path / "eval" / "before.json").is_file():
            add(path, "before")
    return folders


def _serve(runs: list[RunIndex], port: int, open_browser: bool) -> None:
    import webbrowser

    from offbook.view.server import Server

    try:
        server = Server(runs, port, outcome)
    except OSError as error:
        raise OffbookError(f"cannot listen on port {port}: {error.strerror}; --port 0 takes any free one") from None
    print(f"{server.url}  (Ctrl-C ends it)", flush=True)
    if open_browser:
        webbrowser.open(server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass  # how one leaves it
    finally:
        server.server_close()


def outcome(runs: list[RunIndex]) -> str:
    """Sentences for the top of the page: each measured run against the first one; empty for fewer than two."""
    from offbook.evals.compare import find_evaluation

    places = [(run.name, find_evaluation(run.root)) for run in runs]
    measured = [(name, one, one.stat().st_mtime_ns) for name, one in places if one]
    return _compared(*measured) if 1 < len(measured) <= 1 + MAX_OTHERS else ""


@lru_cache(maxsize=4)  # the page asks every two seconds
def _compared(*measured: tuple[str, Path, int]) -> str:
    from offbook.evals.compare import compare, load_evaluation

    try:
        compared = compare([load_evaluation(name, place) for name, place, _ in measured], KEYS)
    except (OffbookError, OSError):  # the page counts what cannot be read
        return ""
    base, *others = compared.evaluations
    sentences = []
    for index, other in enumerate(others):
        invalid, base_invalid = (one.result.get("invalid_per_100") for one in (other, base))
        if invalid is None or base_invalid is None:  # a run that called nothing has no share of invalid calls
            continue
        verdicts = {key: _verdict(compared.differences[key][index].p) for key in KEYS}
        num_paired = compared.num_paired[index]
        sentences.append(
            f"{other.name} makes {invalid:.1f} invalid calls per 100, {base.name} {base_invalid:.1f}"
            f"{verdicts['invalid_per_100']}. They solve {other.result['solved']:.1%} and {base.result['solved']:.1%}"
            f"{verdicts['solved']}. "
            + (f"Paired over {num_paired} tasks." if num_paired else "They have no task in common.")
        )
    return " ".join(sentences)


def _verdict(p: float | None) -> str:
    if p is None:
        return ""
    chance = "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
    return f" ({chance})" if p < 0.05 else f": no difference shown ({chance})"
