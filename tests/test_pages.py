"""Documentation search: one store of pages, the same answers on every route, pinned, and without removed code."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path

import httpx2
import pytest
from scripted import Scripted, merging_chat
from test_held import given

from offbook.agent.harness.pages import NAME, Pages
from offbook.agent.harness.tool import ToolFailed, Workbench
from offbook.agent.recorder import Session
from offbook.agent.serve.app import Sessions, make_app
from offbook.agent.serve.server import Serving, listen
from offbook.core.config import load_config
from offbook.rl.collector import Collector
from offbook.rl.tasks import task_sets
from offbook.sandbox import open_sandbox
from offbook.types import Limits, OffbookError, ToolCall

__all__ = ["given"]  # a fixture
OWNER = "owner"


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    folder = tmp_path / "pages"
    (folder / "guide").mkdir(parents=True)
    (folder / "guide" / "parsing.md").write_text("# Parsing\n\nUse parse_date to read a date.\nIt takes a text.\n")
    (folder / "words.txt").write_text("initials(name) gives the first letters\n")
    (folder / "logo.png").write_bytes(b"\x89PNG")
    return folder


def test_every_route_gives_the_same_answer(pages: Path, tmp_path: Path, given: dict[str, str]) -> None:
    config = load_config(["standard"], {**given, "tools.pages": json.dumps([str(pages)]), "out": str(tmp_path / "out")})
    collector = Collector(config, Path(config.model))
    (task,) = task_sets(config).train
    toolset = collector.harness.toolset(task)
    assert NAME in toolset.names, "every agent has it"
    question = "how is a date parsed"

    async def answers() -> tuple[str, str, str, int]:
        async with await open_sandbox(task.tree, collector.sandbox) as sandbox:
            ours = await toolset.run(ToolCall(NAME, {"query": question}), Workbench(sandbox, Limits()))
            with pytest.raises(ToolFailed, match="needs words"):
                await toolset.run(ToolCall(NAME, {"query": "?"}), Workbench(sandbox, Limits()))
        engine, chat = Scripted(["x"]), merging_chat()
        sessions = Sessions(lambda rollout: Session(rollout, chat, engine.open, Limits()), owner=OWNER)
        _, key = sessions.open("s")
        assert collector.pages is not None
        listener = listen(0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/tools/search_docs"
        async with (
            aclosing(Serving(make_app(sessions, collector.pages.answer), listener)),
            httpx2.AsyncClient() as http,
        ):
            http.headers["Authorization"] = f"Bearer {key}"
            served = (await http.post(url, json={"query": question})).json()["answer"]
            wrong = await http.post(url, json={"query": "?"})
            assert "needs words" in wrong.json()["error"]["message"]
            assert (await http.post(url, json={"query": 5})).status_code == 400
            http.headers["Authorization"] = "Bearer wrong"
            return ours, served, await Pages([str(pages)]).search(question), (await http.post(url, json={})).status_code

    ours, served, alone, refused = asyncio.run(answers())
    assert ours == served == alone
    assert ours.splitlines()[0] == "guide/parsing.md"
    assert "Use parse_date to read a date." in ours
    assert refused == 401


def test_a_page_with_removed_code_is_refused(pages: Path, given: dict[str, str]) -> None:
    config = load_config(["standard"], {**given, "tools.pages": json.dumps([str(pages)])})
    (task,) = task_sets(config).train
    code = "def total(prices, tax):\n    amount = 0\n    for price in prices:\n        if price > 0:\n            amount += price * (1 + tax)\n    return round(amount, 2)\n"  # noqa: E501
    (task.folder / "solution" / "removed.json").write_text(json.dumps({"shop.py::total": code}))
    task_sets(config)
    (pages / "guide" / "shop.md").write_text(f"# Shop\n\nIt was written so:\n\n```python\n{code}```\n")
    with pytest.raises(OffbookError) as refused:
        task_sets(config)
    assert f"the page guide/shop.md of {pages} (tools.pages) holds shop.py::total" in str(refused.value)
    assert task.id in str(refused.value)


def test_a_folder_without_pages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OffbookError, match="there is no folder"):
        Pages([str(tmp_path / "none")])
    with pytest.raises(OffbookError, match="there are no pages"):
        Pages([str(tmp_path)])
