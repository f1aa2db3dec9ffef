"""Chat as token ids: formats, call dialects, transcripts. Knows no harness and no model weights."""

from offbook.tokens.bash import SUBMIT
from offbook.tokens.calls import BASH, HERMES, XML, Dialect, dialect_named
from offbook.tokens.chat import Chat, Laid, Transcript
from offbook.tokens.chatml import ChatFormat
from offbook.tokens.hermes import parse as parse_calls
from offbook.tokens.hermes import render as render_call
from offbook.tokens.hub import chat_for
from offbook.tokens.plain import byte_chat
from offbook.tokens.rendered import RenderedChat
from offbook.tokens.strict import CALL_END, CALL_START
from offbook.tokens.template import BLOCK_END, BLOCK_START

__all__ = [
    "BASH",
    "BLOCK_END",
    "BLOCK_START",
    "CALL_END",
    "CALL_START",
    "HERMES",
    "SUBMIT",
    "XML",
    "Chat",
    "ChatFormat",
    "Dialect",
    "Laid",
    "RenderedChat",
    "Transcript",
    "byte_chat",
    "chat_for",
    "dialect_named",
    "parse_calls",
    "render_call",
]
