"""Quickstart as a new user runs it. Slow: `make test-slow`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_quickstart_shows_what_the_readme_says_and_again_the_same(tmp_path: Path) -> None:
    """One seed of docs/results/quickstart.md, with room for chance; then the same table from scratch."""
    summaries = []
    for attempt in ("first", "second"):
        process = subprocess.run(
            [sys.executable, "-m", "offbook", "quickstart", "--out", str(tmp_path / attempt)],
            env={**os.environ, "OFFBOOK_CACHE": str(tmp_path / f"cache-{attempt}")},
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr
        summaries.append(json.loads((tmp_path / attempt / "summary.json").read_text()))
        assert '"heading":"Next: train your own' in (tmp_path / attempt / "report.html").read_text()
        before = json.loads((tmp_path / attempt / "eval" / "before.json").read_text())
        assert before["contamination"]["same_task"] == 0
    first, second = ({key: value for key, value in summary.items() if key != "seconds"} for summary in summaries)
    assert first == second
    assert first["before"]["invalid_per_100"] >= 20
    assert first["rl_hints"]["invalid_per_100"] <= 8
    assert first["rl"]["invalid_per_100"] >= 2 * first["rl_hints"]["invalid_per_100"]
    assert first["rl_hints"]["solved"] >= first["before"]["solved"] + 0.05
