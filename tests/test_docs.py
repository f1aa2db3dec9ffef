"""README and docs: their links lead somewhere, README's verbs exist, and its table is what the kept results say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from offbook.cli import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROWS = {  # README's row: the row of the table that proof_report.py prints
    "before": "before",
    "RL, 36 steps": "RL, 36 steps",
    "RL + hints, 12 steps": "RL + bounded hints, moved tokens, 12 steps",
    "RL + penalty, 12 steps": "RL + advantage -1 on the same message, 12 steps",
    "RL + hints, 36 steps": "RL + bounded hints, moved tokens, 36 steps",
}


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if link.startswith(("http://", "https://")):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(link)
    assert not dead


def named_in(page: Path) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`\n]+)`", page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_and_keys_that_pages_name_exist(page: Path) -> None:
    modules = [
        path for folder in ("src", "bench", "tests", "docs", "examples") for path in (ROOT / folder).rglob("*.py")
    ]
    keys = set(re.findall(r"^\| `([a-z_.]+)`", (ROOT / "docs" / "config.md").read_text(), re.MULTILINE))
    sections = {key.partition(".")[0] for key in keys if "." in key}
    wrong = []
    for name in named_in(page):
        word = re.split(r"[ =]", name.lstrip("-"))[0]
        if re.fullmatch(r"[\w/]+\.py", word):
            if not any(f"/{module}".endswith(f"/{word}") for module in modules):
                wrong.append(name)
        elif re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", word) and word.partition(".")[0] in sections:
            parts = word.split(".")
            parents = {".".join(parts[:end]) for end in range(2, len(parts) + 1)}  # `monitors.policy` is a table
            if not parents & keys and not any(key.startswith(f"{word}.") for key in keys):
                wrong.append(name)
    assert not wrong or page.name == "journal.md"  # it speaks of what is no more


def test_every_page_is_in_the_site_and_in_the_index() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    site = (ROOT / "mkdocs.yml").read_text()
    index = (ROOT / "docs" / "README.md").read_text()
    assert not [page for page in pages if page not in site]
    assert not [page for page in pages - {"README.md"} if f"]({page})" not in index]


def test_the_verbs_of_the_readme_exist() -> None:
    verbs = README.partition("| | verbs |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([a-z]+)`", verbs)) | {"tasks"}
    parts_of_tasks = {"check", "show", "grade", "leaks", "harden"}
    assert named - parts_of_tasks == set(get_command(app).commands)


def cells(table: str, name: str) -> dict[str, str]:
    """A row of a Markdown table by its headings, without intervals and bold type."""
    lines = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table.splitlines() if "|" in line]
    (row,) = (line for line in lines if line[0] == name)
    return {heading: re.sub(r" \[.*", "", cell) for heading, cell in zip(lines[0], row, strict=True)}


def test_the_table_of_the_readme_is_what_the_results_say() -> None:
    script = ROOT / "bench" / "gpu" / "proof_report.py"
    results = ROOT / "docs" / "results" / "real-model.json"
    done = subprocess.run([sys.executable, script, results], capture_output=True, text=True, timeout=300, check=True)
    measured = done.stdout.partition("\n\n")[0]
    start = README.index("| | solved and handed in")
    shown = README[start:].partition("\n\n")[0]
    for ours, theirs in ROWS.items():
        row = cells(shown, ours)
        source = cells(measured, theirs)
        for heading in ("solved and handed in", "solved", "invalid calls per 100", "turns"):
            assert float(row[heading].strip("%")) == pytest.approx(float(source[heading].strip("%")), abs=0.05)
