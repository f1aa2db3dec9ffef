"""The versions of a cycle behind an endpoint: whose sessions take which place."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from scripted import Scripted

from offbook.agent.chat import byte_chat
from offbook.agent.recorder import Asked, Refused, Said
from offbook.agent.serve.app import Sessions
from offbook.core.config import Config
from offbook.live.cycle import Cycle
from offbook.live.serving import Versions
from offbook.live.sessions import Decision
from offbook.rl.collector import Collector
from offbook.types import OffbookError


class Endpoint:
    """An endpoint's sessions, without its port."""

    def __init__(self, out: Path):
        sections = {"engine": {"kind": "continuous"}, "live": {"consent": "all", "settle_s": 0.0}}
        config = Config.model_validate({"out": str(out), "model": "http://nowhere", **sections})
        cycle = Cycle(config)
        cycle.folder.decide(Decision("start", "", deployed=0, version=0, path="nowhere"))
        self.engine = Scripted(byte_chat(), [])
        self.versions = Versions(cycle, config, {0: Collector(config, None, "m", lent=self.engine)})  # type: ignore[arg-type]
        self.sessions = Sessions(self.versions.make, self.versions.keep)

    async def session(self, name: str) -> None:
        session, _ = self.sessions.open(name, group=f"user of {name}")
        self.engine.answers.append("border in shapes.py adds up the sides.")
        await session.answer(Asked((Said("user", "Write border in shapes.py."),)))
        self.sessions.end(name)


def test_no_session_takes_the_place_of_another(tmp_path: Path) -> None:
    """Also of one that a server before this one kept, and by a name that is another one's as a file."""
    first, second = Endpoint(tmp_path), Endpoint(tmp_path)

    async def main() -> None:
        await first.session("team/ada")
        before = (tmp_path / "sessions" / "team.ada.json").read_text()
        for sessions, name, why in (
            (first.sessions, "team/ada", "already"),
            (second.sessions, "team/ada", "already"),
            (second.sessions, "team.ada", "already"),
            (second.sessions, "n" * 101, "up to 100 letters"),
        ):
            with pytest.raises(OffbookError, match=why):
                sessions.open(name)
        second.sessions.open("a/b")
        with pytest.raises(Refused, match="already"):
            second.sessions.open("a.b")
        assert (tmp_path / "sessions" / "team.ada.json").read_text() == before

    asyncio.run(main())


def test_a_session_in_which_nothing_was_said_holds_no_version(tmp_path: Path) -> None:
    here = Endpoint(tmp_path)

    async def main() -> None:
        here.sessions.open("silent")
        here.sessions.end("silent")
        await here.session("one")
        assert here.versions._given == {}

    asyncio.run(main())
