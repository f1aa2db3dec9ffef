"""A chat format that needs no model."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from offbook.tokens.chatml import ChatFormat
from offbook.tokens.strict import CALL_END, CALL_START
from offbook.tokens.template import BLOCK_END, BLOCK_START


def byte_chat(dialect: str = "hermes") -> ChatFormat:
    """Bytes and the marks of the format: it spells anything, and records what a model behind a URL said."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BLOCK_START, BLOCK_END])
    tokenizer.add_tokens([CALL_START, CALL_END])
    return ChatFormat(tokenizer, dialect, results="user" if dialect == "bash" else "tool")
