"""The nouns. Plain data, no torch, nothing of ours imported.

Tokens are the truth: a Segment holds the ids exactly as they were fed and sampled, and text is a view of them.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol

Json = dict[str, Any]
Role = Literal["system", "user", "assistant", "tool"]
STRICT = {"extra": "forbid"}  # for pydantic, where it reads one of these from a file: no key is passed over


class OffbookError(Exception):
    """A problem that the user can fix. The command line prints its message and exits with `exit_code`."""

    exit_code = 1


class MachineFault(OffbookError):
    """A sandbox or its test runner did not start. That says nothing about the code, so nothing is scored."""


class ModelLost(OffbookError):
    """The model cannot be asked. That says nothing about an agent, so it ends the run and no rollout."""


class ServerLost(ModelLost):
    """The one behind a URL. `server` is its name, where there may be several."""

    server = ""


class Hung(OffbookError):
    """Something in a thread of this process. A thread cannot be ended, so the process ends with what it says."""


class ModelHung(ModelLost, Hung):
    """The one in a thread of this process."""


class PromptTooLong(OffbookError):
    """The conversation has outgrown the model."""


@dataclass(frozen=True)
class Limits:
    """When a rollout ends whether or not the agent is done."""

    turns: int = 8
    tokens: int = 4096  # of all segments together
    context: int = 4096  # of one segment
    message_tokens: int = 256
    summarize_at: int = 0  # tokens of a segment after which the agent is asked for a summary; 0 is never
    summary_tokens: int = 1024
    command_s: float = 20.0
    wall_s: float = 300.0


@dataclass(frozen=True)
class Suite:
    """How the tests of a repository are run."""

    __pydantic_config__ = STRICT

    environment: Path | None = None  # a folder with an interpreter, python/, and its packages, deps/; None: offbook's
    import_roots: tuple[str, ...] = (".",)  # folders of the tree that go on sys.path
    options: tuple[str, ...] = ()  # for pytest
    start: str = ""  # a command that gets a sandbox ready for them, and for the agent


@dataclass(frozen=True)
class Deleted:
    """What was deleted to make a task."""

    __pydantic_config__ = STRICT

    kind: str  # single, cluster or release
    level: str  # stub, hybrid, gone or release
    targets: tuple[str, ...]  # "path::name" of what the instruction asks for
    functions: tuple[str, ...]  # and of everything that was deleted
    lines: int  # that the gold patch adds
    files: int  # that it touches
    callers: int  # functions left over that use the targets
    floor: float  # the share of fail_to_pass that a trivial body passes


@dataclass(frozen=True)
class Context:
    """What the user's editor shows while they ask, with things that do not matter among it. Paths are the tree's."""

    __pydantic_config__ = STRICT

    open: tuple[str, ...] = ()  # "path:line", where the cursor is; the first is in front
    edits: tuple[str, ...] = ()  # "path:first-last", the latest first


@dataclass(frozen=True)
class Interrupt:
    """What the user says in the middle: after so many turns, or when the agent would end before."""

    __pydantic_config__ = STRICT

    after_turns: int
    text: str


@dataclass(frozen=True)
class Task:
    """A Harbor task folder with an `[offbook]` table, loaded. See docs/tasks.md for the folder's layout."""

    __pydantic_config__ = STRICT

    id: str
    folder: Path
    instruction: str
    tree: Path  # what the agent sees: the repository with the feature deleted
    hidden_tests: Path  # never enters the sandbox before scoring
    test_files: tuple[str, ...]  # the repository's test files, relative to the tree; restored before scoring
    fail_to_pass: tuple[str, ...]  # node ids
    pass_to_pass: tuple[str, ...]
    tools: tuple[str, ...]
    origin: str  # the repository this task was made from
    difficulty: str = "normal"
    test_command: str = ""  # what the tool run_tests runs, where the task offers it
    suite: Suite = field(default_factory=Suite)
    sources: tuple[str, ...] = ()  # folders and files that are the product: only changes to these are graded
    deleted: Deleted | None = None
    script: str = ""  # what judges instead of the tests, in folders that others made
    leave: bool = False  # the right answer is to change nothing
    interrupt: Interrupt | None = None
    context: Context | None = None
    # Kinds of findings that the work itself calls for, by the gold patch (monitors/rules.py); None: unknown.
    allows: tuple[str, ...] | None = None
    num_mutants: int = 0  # in tests/mutants.json, so that one which is lost is missed


def is_test_file(path: str) -> bool:
    """By the names that pytest and people go by; a path relative to the repository."""
    parts = PurePosixPath(path).parts
    name = parts[-1] if parts else ""
    named = name.startswith("test_") or name.endswith("_test.py") or name in ("test.py", "tests.py", "conftest.py")
    return named or "tests" in parts[:-1]


@dataclass(frozen=True)
class ToolCall:
    """One attempted call. `error` says why it could not be read as a call; then name and arguments may be empty."""

    name: str
    arguments: Json = field(default_factory=dict)
    error: str | None = None
    start: int = 0  # where in the message's text the attempt begins
    other_dialect: bool = False  # it is written as the calls of other models are, and was not read


CallStatus = Literal["ok", "failed", "unknown_tool", "malformed"]
INVALID: frozenset[CallStatus] = frozenset({"unknown_tool", "malformed"})


@dataclass(slots=True)
class Message:
    """A message and where its tokens lie: ids[start:end], header first; its own words are ids[body:body_end].

    `status` is set on tool messages: how the call that they answer went.
    """

    role: Role
    text: str
    start: int
    body: int
    body_end: int
    end: int
    calls: tuple[ToolCall, ...] = ()
    status: CallStatus | None = None


@dataclass(frozen=True)
class Routes:
    """The experts that tokens went to, from the first token on: in each of some layers `top` of them, token after
    token, as 16-bit numbers in base64. The last token that was sampled has gone nowhere yet."""

    layers: int
    top: int
    ids: str

    @classmethod
    def pack(cls, layers: int, top: int, ids: bytes) -> Routes:
        return cls(layers, top, base64.b64encode(ids).decode())

    def unpack(self) -> bytes:
        return base64.b64decode(self.ids)

    def upto(self, tokens: int) -> Routes:
        return Routes.pack(self.layers, self.top, self.unpack()[: 2 * self.layers * self.top * tokens])


@dataclass(slots=True)
class Segment:
    """One context window. Its first four lists run in parallel, one entry a token."""

    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the behaviour policy; 0 where not sampled
    versions: list[int] = field(default_factory=list)  # policy version that sampled the token; -1 where not sampled
    messages: list[Message] = field(default_factory=list)
    summary: int | None = None  # the message that sums up this segment for the next one
    routes: Routes | None = None  # of a mixture of experts

    def is_own(self, message: Message) -> bool:
        """The agent wrote it: a worked example is not its own. Rollouts of other agents have no tokens to tell by."""
        is_sampled = not self.sampled or any(self.sampled[message.body : message.end])
        return message.role == "assistant" and is_sampled

    def up_to(self, count: int) -> Segment:
        """Its first messages alone."""
        end = self.messages[count - 1].end if count else 0
        return Segment(
            ids=self.ids[:end],
            sampled=self.sampled[:end],
            logprobs=self.logprobs[:end],
            versions=self.versions[:end],
            routes=self.routes.upto(end) if self.routes else None,
            messages=self.messages[:count],
        )


StopReason = Literal["finish", "answer", "turns", "tokens", "context", "wall", "crash"]


@dataclass(frozen=True)
class Prices:
    """What a million tokens cost; every turn pays for its whole prompt."""

    input: float = 0.0
    output: float = 0.0


@dataclass(slots=True)
class Usage:
    """What a rollout took. Its sampled tokens are thinking, call, final and summary tokens together."""

    turns: int = 0
    calls: int = 0
    invalid_calls: int = 0
    summaries: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    thinking_tokens: int = 0  # what a message says before its first call
    call_tokens: int = 0
    final_tokens: int = 0  # of messages without a call
    summary_tokens: int = 0
    output_tokens: int = 0  # of tool output; part of the prompt tokens
    drift: int = 0  # turns whose prompt did not extend the turn before: must be 0
    cost: float = 0.0
    seconds: float = 0.0  # until the agent was done
    model_seconds: float = 0.0  # of these, waiting for messages; the others went to tools
    summary_seconds: float = 0.0  # of the model's, for self-summaries
    scoring_seconds: float = 0.0  # after these: grading, rewards, monitors
    slot_seconds: float = 0.0  # before these: waiting until fewer rollouts ran
    timeouts: int = 0  # commands that their timeout ended
    longest_call: str = ""
    longest_call_seconds: float = 0.0


@dataclass(frozen=True)
class Event:
    """Something that happened besides the conversation: a crash, a refused path, a call that was none."""

    message: int
    kind: str
    detail: str
    segment: int = 0
    place: str = ""  # of opened files: why they are worth a second look (sandbox/access.py)
    paths: tuple[str, ...] = ()  # of opened files


# Events that say that the machine, or the model's server, ended a rollout and not the agent; the detail is the cause.
FAULTS = ("machine_fault", "server_fault")
OWN_FAULT = "own_fault"  # came again on a second attempt, after commands: the agent's own doing
MENDED_FAULT = "mended_fault"  # a first attempt was ended by the machine, and this is the second one


@dataclass(frozen=True)
class Flag:
    """A monitor's finding, with the message it points at."""

    kind: str
    message: int
    evidence: str
    segment: int = 0


@dataclass(slots=True)
class Reward:
    """Named parts and their weights; the total is always computed from them."""

    parts: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.weights.get(name, 1.0) * value for name, value in self.parts.items())


@dataclass(slots=True)
class Rollout:
    id: str
    task: str
    group: str
    tools: tuple[str, ...]
    segments: list[Segment] = field(default_factory=list)
    stop: StopReason = "crash"
    usage: Usage = field(default_factory=Usage)
    changed: dict[str, str | None] = field(default_factory=dict)  # path -> new text, None where the file was deleted
    partial: list[str] = field(default_factory=list)  # changed files whose text is not whole: binary, or too much
    diff: str = ""  # the same changes, for people
    events: list[Event] = field(default_factory=list)
    reward: Reward = field(default_factory=Reward)
    flags: list[Flag] = field(default_factory=list)
    own_names: dict[str, str] = field(default_factory=dict)  # of tools, by the names that this agent was shown
    foreign: bool = (
        False  # another agent's work: its tools and its sandbox are not ours; with tokens where it was recorded
    )

    @property
    def solved(self) -> bool:
        return self.reward.parts.get("outcome", 0.0) >= 1.0

    @property
    def fault(self) -> str:
        """What of the machine or the model's server ended it: then it says nothing about the agent. Else empty."""
        return next((event.detail for event in self.events if event.kind in FAULTS), "")

    @property
    def struck(self) -> bool:
        """Whether a fault of the machine or the server struck it, mended by a second attempt or not."""
        return any(event.kind in (*FAULTS, MENDED_FAULT) for event in self.events)

    @property
    def has_acted(self) -> bool:
        """Whether the agent has asked for a command, answered or not."""
        own = (message for segment in self.segments for message in segment.messages if segment.is_own(message))
        return any(message.calls for message in own)

    @property
    def cause(self) -> str:
        """Why it crashed, in a few words."""
        details = [event.detail for event in self.events if event.kind == OWN_FAULT]
        lines = [event.detail.strip().rpartition("\n")[2] for event in self.events if event.kind == "crash"]
        return self.fault or next(iter([*details, *lines]), "no cause on record")[:120]


@dataclass(frozen=True)
class Completion:
    """Sampled ids, the log-probability of each under the policy that sampled it, and that policy's version."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    billed: tuple[int, int] | None = None  # prompt and sampled tokens, where the model's server counts them itself
    routes: Routes | None = None  # of the prompt and of these, where the engine knows them


@dataclass(frozen=True)
class ToolSpec:
    """A tool as this task's agent sees it. `parameters` is the JSON schema of the arguments."""

    name: str
    description: str
    parameters: Json


@dataclass(frozen=True)
class Prompt:
    """What is to be continued: the ids are the truth, the messages and tools are the same for a model behind a URL."""

    ids: list[int]
    messages: tuple[Message, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    heard: Callable[[list[int]], None] | None = None  # gets the ids so far, from an engine that streams


class Policy(Protocol):
    """A source of the assistant's messages: ids in, ids out."""

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion: ...


@dataclass(frozen=True)
class Target:
    """The message that went wrong, the rule it broke, and what shows it."""

    rollout: str
    segment: int
    message: int
    rule: str
    evidence: str

    @property
    def key(self) -> str:
        return f"{self.rollout}/{self.segment}/{self.message}"


@dataclass(frozen=True)
class Hint:
    """A general rule in a sentence, never this instance's answer."""

    rule: str
    text: str


Likely = list[tuple[int, float]]  # the likeliest tokens at a place, with their log-probabilities
Likeliest = list[tuple[str, float]]  # the same as text


@dataclass(slots=True)
class Feedback:
    """A target with its hint and, once trained on, what the hint did to each of the message's tokens."""

    target: Target
    hint: Hint
    pieces: list[str] = field(default_factory=list)  # the target's tokens as text
    student: list[float] = field(default_factory=list)  # log-probability of each sampled token without the hint
    teacher: list[float] = field(default_factory=list)  # the same with the hint
    divergence: list[float] = field(default_factory=list)  # over the whole vocabulary, at each token
    skipped: str = ""  # why the hint did not teach
    student_top: list[Likeliest] = field(default_factory=list)  # at each token, empty where the two hardly differ
    teacher_top: list[Likeliest] = field(default_factory=list)


Direction = Literal["forward", "reverse", "jsd"]


@dataclass(frozen=True)
class Distill:
    """How branches teach. The trainer knows no algorithm: an annotator says all of it here."""

    teacher: str = "live"  # by the name that the trainer was given it under
    part: str = "distill"  # of the loss, which is a mean over the target tokens of all branches of the same part
    by_policy: bool = False  # divided by the step's RL tokens instead: the fewer targets, the less the part counts
    bound: float = 0.0  # the most that the norm of the part's gradient may be, by RL's; 0 is no bound
    direction: Direction = "forward"
    cap: float = math.inf  # nats that a token may count for
    gate: float = 0.0  # nats per token by which a branch has to move its target, away from what was sampled; 0 is none
    token_gate: float = 0.0  # nats by which it has to move a token for that token to teach; 0 is all of them
    places: int = 0  # branches of a sample that teach, at most: those that move their target most; 0 is no limit
    top: int = 0  # likeliest tokens to report where student and teacher differ


@dataclass(slots=True)
class Branch:
    """Another reading of a sample: at `insert`, `inserted` ids are spliced in and the sample's own follow.

    The teacher is scored on the tokens in `spans` only, each a start and an end in the sample's ids.
    """

    insert: int
    inserted: list[int]
    spans: tuple[tuple[int, int], ...]
    weight: float = 1.0
    distill: Distill = field(default_factory=Distill)
    key: str = ""  # names the branch in what a step reports; without one nothing is reported of it

    @property
    def end(self) -> int:
        return self.spans[-1][1]

    @property
    def num_targets(self) -> int:
        return sum(end - start for start, end in self.spans)


@dataclass(slots=True)
class Sample:
    """What train eats: ids and per-token streams. It knows no algorithm; an annotator filled the streams.

    A stream that is shorter than the ids is 0 from there on.
    """

    ids: list[int]
    logprobs: list[float] = field(default_factory=list)  # of the behaviour policy
    advantage: list[float] = field(default_factory=list)
    rl_weight: list[float] = field(default_factory=list)
    ce_weight: list[float] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    temperature: float = 1.0  # that it was sampled at
    versions: list[int] = field(default_factory=list)  # policy version that sampled each token; -1 where not sampled
    routes: Routes | None = None  # of a mixture of experts: where the engine sent these tokens
