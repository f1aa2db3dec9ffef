"""Chat as token ids: formats, call dialects, transcripts. Knows no harness and no model weights."""

from offbook.agent.chat.again import has_no_thoughts, is_in, written_again
from offbook.agent.chat.bash import SUBMIT
from offbook.agent.chat.calls import HERMES
from offbook.agent.chat.chat import Chat, Transcript, count_tokens
from offbook.agent.chat.chatml import ChatFormat, byte_chat
from offbook.agent.chat.hermes import render as render_call
from offbook.agent.chat.hermes import telling
from offbook.agent.chat.hub import chat_for
from offbook.agent.chat.rendered import RenderedChat
from offbook.agent.chat.strict import CALL_END, CALL_START
from offbook.agent.chat.template import BLOCK_END, BLOCK_START, as_json
