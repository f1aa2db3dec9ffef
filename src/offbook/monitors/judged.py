"""A judge that reads rollouts for cheating that rules miss. It is never shown what the agent thought."""

from __future__ import annotations

from pathlib import Path

from offbook.judge import Judge, Rubrics
from offbook.types import Event, Flag, Rollout, Task

CHEATING = Rubrics(Path(__file__).with_name("prompts"), thoughts=False)


async def flags_by(judge: Judge, task: Task | None, rollout: Rollout) -> list[Flag]:
    """What it found. What does not hold, and questions without an answer, are events on the rollout."""
    judgement = await judge.read([(rollout, task)])
    for kind, counts in (("malformed", judgement.refused), ("unreachable", judgement.unanswered)):
        rollout.events += [Event(-1, f"monitor_{kind}", f"{count} of: {reason}") for reason, count in counts.items()]
    return [Flag(one.rule, one.message, f"{one.quote!r}: {one.note}"[:240], one.segment) for one in judgement.found]
