"""What is known of a vLLM server: by the engines that share it, and by the event loop that asks it."""

from __future__ import annotations

import asyncio
import secrets
import threading
from dataclasses import dataclass, field

from offbook.core.weights import Weights
from offbook.engine.vllm.server import Server
from offbook.engine.vllm.weights import Sender
from offbook.engine.vllm.wire import Wire
from offbook.types import ServerLost

Answer = tuple[int, bytes]  # status and body


@dataclass(slots=True, eq=False)
class Line:
    """What belongs to one event loop: the connections, the requests on their way, and whether any may be sent."""

    loop: asyncio.AbstractEventLoop
    wires: dict[str, Wire] = field(default_factory=dict)  # by URL: a server that is started again has another
    may_send: asyncio.Event = field(default_factory=asyncio.Event)
    mending: asyncio.Lock = field(default_factory=asyncio.Lock)
    posts: set[asyncio.Task[Answer]] = field(default_factory=set)

    def close(self) -> None:
        for wire in self.wires.values():
            wire.close()


@dataclass
class Shared:
    """What engines of different temperatures on the same server have in common."""

    server: Server
    named: str = field(default_factory=lambda: secrets.token_hex(4))  # a server of the user's own may see many runs
    version: int = 0
    weights: Weights | None = None  # the last that were applied; a server that is started again gets them
    applied: int = 0  # how often: what names weights, since runs that share a server have the same versions
    adapter: str = ""  # the name of the one that the server has
    sender: Sender | None = None
    line: Line | None = None
    starts: int = 0
    restarts: int = 0  # in a row
    given_up: int = 0  # how often
    ended: ServerLost | None = None  # by that, the same for all that were on their way
    answered: float = 0.0  # when a message last came
    lost: ServerLost | None = None  # why it was last started again, the same for all that this struck
    losses: list[ServerLost] = field(default_factory=list)  # all of them
    told: bool = False  # people, that it does not say which experts tokens went to
    asleep: int = 0  # how deeply: 1 keeps the weights in the host's memory, 2 forgets them
    changing: threading.RLock = field(default_factory=threading.RLock)  # whoever starts the server or gives it weights
    replacing: int = 0  # how many give it new weights; meanwhile no line is open
    gate: threading.Lock = field(default_factory=threading.Lock)  # of that, and of making a line
