"""offbook view: a run as a page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def view(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several are shown side by side.")],
    static: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page about one or more runs; it opens offline and can be mailed."""
    from offbook.runfolder import RunFolder
    from offbook.view.report import write_report

    folders = {run.name: RunFolder.open(run).path for run in runs}
    write_report(static, folders, before=None, title=" / ".join(folders), seconds=None)
    print(static)
