"""Chat as token ids: formats, call dialects, transcripts. Knows no harness and no model weights."""

from offbook.agent.chat.chat import (
    BLOCK_END,
    BLOCK_START,
    ChatFormat,
    Transcript,
    behind_header,
    byte_chat,
    count_tokens,
    has_no_thoughts,
    is_in,
    written_again,
)
from offbook.agent.chat.dialects import CALL_END, CALL_START, HERMES, SUBMIT, as_json
from offbook.agent.chat.dialects import render_hermes as render_call

Chat = ChatFormat
chat_for = ChatFormat.from_folder
