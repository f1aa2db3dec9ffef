"""offbook view: runs as a page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from offbook.view.index import RunIndex


def view(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or a folder of them; several are compared.")],
    static: Annotated[Path | None, typer.Option(help="Write the page as one file that can be mailed.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the local server; 0 is any that is free.")] = 8620,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Look at runs, also while they are going on: a page on this machine alone, until Ctrl-C."""
    from offbook.view.index import RunIndex

    found = [RunIndex(name, path) for name, path in _folders(runs).items()]
    if static:
        write_page(static, found, " / ".join(run.name for run in found))
        print(static)
    else:
        _serve(found, port, open_browser)


def write_page(out: Path, runs: list[RunIndex], title: str) -> None:
    from offbook.cli.outcome import outcome
    from offbook.view.single import write_single

    write_single(out, runs, title, outcome)


def _folders(given: list[Path]) -> dict[str, Path]:
    """Runs by name; a folder that is none but has some in it stands for them, and for the measurement before them."""
    from offbook.runfolder import RunFolder

    paths: list[Path] = []
    before: list[Path] = []
    for path in given:
        inner = sorted(child.parent for child in path.glob("*/config.toml")) if path.is_dir() else []
        if cycles := [child.parent for child in (*path.glob("decisions.jsonl"), *path.glob("*/decisions.jsonl"))]:
            paths += [each for cycle in cycles for each in (cycle, *sorted(cycle.glob("cycles/*")))]
            continue
        is_run = (path / "config.toml").is_file()
        paths += [path] if is_run or not inner else inner
        before += [path] if not is_run and inner and (path / "eval" / "before.json").is_file() else []
    folders: dict[str, Path] = {}
    for path in [*(RunFolder.open(path).path for path in paths), *before]:
        real = path.resolve()
        last = "before" if path in before else real.name
        name = last if last not in folders else f"{real.parent.name}/{last}"
        folders[name if name not in folders else str(real)] = real
    return folders


def _serve(runs: list[RunIndex], port: int, open_browser: bool) -> None:
    import webbrowser

    from offbook.cli.outcome import outcome
    from offbook.types import OffbookError
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
