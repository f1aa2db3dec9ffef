"""Chat as token ids: formats, call dialects, transcripts. Knows no harness and no model weights."""

from offbook.agent.chat.chat import (
    Chat,
    Transcript,
    behind_header,
    count_tokens,
    has_no_thoughts,
    is_in,
    written_again,
)
from offbook.agent.chat.chatml import BLOCK_END, BLOCK_START, ChatFormat, byte_chat
from offbook.agent.chat.dialects import CALL_END, CALL_START, HERMES, SUBMIT, as_json
from offbook.agent.chat.dialects import render_hermes as render_call
from offbook.agent.chat.hub import RenderedChat, chat_for
