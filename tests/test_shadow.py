"""A candidate that answers unseen beside the version that is served."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from scripted import Scripted

from offbook.agent.chat import byte_chat, render_call
from offbook.agent.recorder import Asked, Refused, Said
from offbook.agent.serve.app import Sessions
from offbook.core.config import Config
from offbook.live import serving
from offbook.live.cycle import Cycle
from offbook.live.serving import Versions
from offbook.live.sessions import Decision, Session
from offbook.live.shadow import BEHIND
from offbook.rl.collector import Collector
from offbook.types import OffbookError, ToolSpec

EDIT = render_call("edit_file", {"path": "shapes.py", "old": "a", "new": "b"})
DONE = "border in shapes.py adds up the sides."
DODGE = "Which of the two formulas do you want?"
BROKEN = '<tool_call>{"name": "edit_file"</tool_call>'
SCHEMA = {"type": "object", "properties": {name: {"type": "string"} for name in ("path", "old", "new")}}
TOOLS = (ToolSpec("edit_file", "edits", SCHEMA),)
REQUEST = Said("user", "Write border in shapes.py.")


def settings(out: Path, **live: Any) -> Config:
    given = {"consent": "all", "settle_s": 0.0, "first": "shadow", "share": 0.5, "trial": 12, **live}
    sections = {"engine": {"kind": "continuous"}, "harness": {"turns": 100}, "live": given}
    return Config.model_validate({"out": str(out), "model": "http://nowhere", **sections})


class Place:
    """An endpoint's sessions, without its port; each version says what it is told to."""

    def __init__(self, out: Path, candidate: list[Any], **live: Any):
        config = settings(out, **live)
        self.cycle = Cycle(config)
        self.cycle.folder.decide(Decision("start", "", deployed=0, version=0, path="nowhere"))
        self.cycle.folder.decide(Decision("trial", "", deployed=0, candidate=1, version=1, path="nowhere"))
        self.deployed, self.candidate = Scripted(byte_chat(), []), Scripted(byte_chat(), candidate)
        engines = enumerate((self.deployed, self.candidate))
        loaded = {n: Collector(config, None, "m", lent=engine) for n, engine in engines}  # type: ignore[arg-type]
        self.versions = Versions(self.cycle, config, _loaded=loaded)
        self.sessions = Sessions(self.versions.make, self.versions.keep)
        shadowed = (f"s{number}" for number in range(1000))
        self.names = [name for name in shadowed if self.cycle.shadowing(name) is not None]

    async def session(self, name: str, turns: int = 1) -> None:
        """An edit, and the words at the end; then the user has more to say."""
        session, _ = self.sessions.open(name, group=f"user of {name}")
        said: tuple[Said, ...] = (REQUEST,)
        for _ in range(turns):
            self.deployed.answers += [EDIT, DONE]
            first = await session.answer(Asked(said, TOOLS))
            assert [call.name for call in first.shown.calls] == ["edit_file"]
            said += (Said("assistant", "", first.shown.calls, first.call_ids), Said("tool", "ok", ids=first.call_ids))
            last = await session.answer(Asked(said, TOOLS))
            assert last.shown.text == DONE, "of the candidate nobody sees a word"
            said += (Said("assistant", DONE), Said("user", "Thanks, and the same for area."))
        self.sessions.end(name)

    @property
    def shadows(self) -> list[Session]:
        return [one for one in self.cycle.folder.sessions() if one.arm == "shadow"]


@pytest.mark.parametrize(
    ("says", "part", "ends"),
    [([EDIT, DONE], "", "deploy"), ([DODGE, DONE], "dodged", "withdraw"), ([BROKEN] * 2, "broken_calls", "withdraw")],
    ids=["as good", "dodging", "breaking calls"],
)
def test_a_shadow_is_compared_message_by_message(tmp_path: Path, says: list[str], part: str, ends: str) -> None:
    turns = 3
    here = Place(tmp_path, says * turns * 40)

    async def main() -> None:
        for name in here.names[:40]:
            await here.session(name, turns)
            while here.versions._ending and len(here.shadows) < len(here.deployed.log) // (2 * turns):
                await asyncio.sleep(0.001)
        unshadowed = next(name for name in map(str, range(100)) if here.cycle.shadowing(name) is None)
        await here.session(unshadowed)
        await here.versions.aclose()

    asyncio.run(main())
    assert len(here.shadows) == 40
    assert [prompt for prompt, _ in here.candidate.log] == [prompt for prompt, _ in here.deployed.log[: 80 * turns]]
    for one in here.shadows:
        assert (one.version, one.has_words, one.id) == (1, False, f"{one.id.removesuffix('-shadow')}-shadow")
        assert one.shown == {"broken_calls": 0.0, "dodged": 0.0}
        assert {name for name, value in one.rollout.reward.parts.items() if value} == ({part} if part else set())
        assert "border" not in (tmp_path / "sessions" / f"{one.id}.json").read_text()
    decision = here.cycle.turn()
    assert decision is not None
    assert (decision.kind, decision.numbers["first"]) == (ends, "shadow")
    assert "40 shadows" in here.versions.told()


@pytest.mark.parametrize(
    ("says", "turns", "why"),
    [
        ([OffbookError("the candidate cannot be asked")], 1, "cannot be asked"),
        ([None], 1, "the server stopped"),
        ([None], BEHIND, "answers behind"),
    ],
    ids=["fails", "hangs", "too slow"],
)
def test_a_shadow_that_is_lost_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: list[Any], turns: int, why: str
) -> None:
    monkeypatch.setattr(serving, "LAST_S", 0.2)
    here = Place(tmp_path, says)

    async def main() -> None:
        await here.session(here.names[0], turns)
        await here.versions.aclose()

    asyncio.run(main())
    assert [one.id for one in here.cycle.folder.sessions()] == here.names[:1]
    assert (here.versions.lost.total(), why in here.versions.told()) == (1, True), here.versions.told()
    assert here.candidate.opened == here.candidate.closed


def test_without_consent_or_a_candidate_nobody_is_shadowed(tmp_path: Path) -> None:
    assert not Place(tmp_path / "none", [], consent="none").names
    assert not Place(tmp_path / "share", [], first="share").names
    here = Place(tmp_path / "over", [])
    assert 400 < len(here.names) < 600
    here.cycle.folder.decide(Decision("withdraw", "", deployed=0, version=1))
    assert here.cycle.shadowing(here.names[0]) is None


def test_no_session_takes_the_place_of_another(tmp_path: Path) -> None:
    """Also of one that a server before this one kept, and by a name that is another one's as a file."""
    first, second = Place(tmp_path, [], first="share"), Place(tmp_path, [], first="share")

    async def main() -> None:
        first.versions._loaded[1] = first.versions._loaded[0]
        await first.session("team/ada")
        before = (tmp_path / "sessions" / "team.ada.json").read_text()
        for sessions, name, why in (
            (first.sessions, "team/ada", "already"),
            (second.sessions, "team/ada", "already"),
            (second.sessions, "team.ada", "already"),
            (second.sessions, "n" * 101, "up to 100 letters"),
            (second.sessions, "ada-shadow", "those of shadows"),
        ):
            with pytest.raises(OffbookError, match=why):
                sessions.open(name)
        second.sessions.open("a/b")
        with pytest.raises(Refused, match="already"):
            second.sessions.open("a.b")
        assert (tmp_path / "sessions" / "team.ada.json").read_text() == before

    asyncio.run(main())


def test_a_session_in_which_nothing_was_said_holds_no_version(tmp_path: Path) -> None:
    here = Place(tmp_path, [], first="share")

    async def main() -> None:
        here.versions._loaded[1] = here.versions._loaded[0]
        here.sessions.open("silent")
        here.sessions.end("silent")
        await here.session("one")
        assert here.versions._given == {}

    asyncio.run(main())
