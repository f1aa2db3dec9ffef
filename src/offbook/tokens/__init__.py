"""Chat as token ids: formats, call dialects, transcripts. Knows no harness and no model weights."""

from offbook.tokens.again import has_no_thoughts, is_in, written_again
from offbook.tokens.bash import SUBMIT
from offbook.tokens.calls import HERMES
from offbook.tokens.chat import Chat, Transcript, count_tokens
from offbook.tokens.chatml import ChatFormat, byte_chat
from offbook.tokens.hermes import render as render_call
from offbook.tokens.hermes import telling
from offbook.tokens.hub import chat_for
from offbook.tokens.rendered import RenderedChat
from offbook.tokens.strict import CALL_END, CALL_START
from offbook.tokens.template import BLOCK_END, BLOCK_START, as_json
