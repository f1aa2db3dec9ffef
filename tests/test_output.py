import asyncio
import os
import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.sandbox.output import Output, plain_text

CONTROL_HEAVY = st.text(st.one_of(st.sampled_from("\x1b\x9b\x9d\x90\x07\x9c\r\n\t\\[]P;0mK"), st.characters()))


def collected(data: bytes, limit_bytes: int, chunk_bytes: int = 4096) -> Output:
    async def run() -> Output:
        output = Output(limit_bytes)
        write_end = output.open()
        for start in range(0, len(data), chunk_bytes):
            os.write(write_end, data[start : start + chunk_bytes])
            output.read()
        os.close(write_end)
        output.close()
        return output

    return asyncio.run(run())


@given(CONTROL_HEAVY)
def test_no_control_characters_remain(text: str) -> None:
    plain = plain_text(text)
    assert not [character for character in plain if unicodedata.category(character) == "Cc" and character not in "\n\t"]
    assert plain.count("\n") == text.count("\n")
    assert plain_text(plain) == plain


@given(st.text(st.one_of(st.just("\n"), st.just("\t"), st.characters(exclude_categories=["Cc"]))))
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert plain_text(text) == text


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x9b1mred", "red"),
        ("\x1b[?25lhidden cursor", "hidden cursor"),
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x1b]52;c;Y2xpcGJvYXJk\x1b\\b", "ab"),
        ("\x1b]8;;http://example.org\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPq#0;2\x1b\\sixel", "sixel"),
        ("\x1b]0;never closed\nnext line", "0;never closed\nnext line"),
        ("\x1b(Bcharset\x1bc", "charset"),
        ("one\r\ntwo\r\n", "one\ntwo\n"),
        ("10%\r50%\r100%\ndone\r", "100%\ndone"),
        ("\r 10%\r 100%\x1b[K\r\x1b[0m\n", " 100%\n"),
        ("bell\x07 null\x00 back\x08", "bell null back"),
    ],
)
def test_known_sequences(text: str, plain: str) -> None:
    assert plain_text(text) == plain


@pytest.mark.parametrize(
    "unit", ["\x1b]", "\x1b[", "\x9d", "\x90a", "\x1b", "\r", "a\r", "\r\r\n", "a", "\x1b[0", "0;", "\x1b ", "\n"]
)
def test_time_is_linear(unit: str) -> None:
    adversarial = (unit * 65536)[:65536]
    for text in (adversarial, "\x1b]" + adversarial, adversarial + "\n", adversarial + "a"):
        start = time.process_time()
        plain_text(text)
        assert time.process_time() - start < 0.25  # a quadratic pattern takes seconds


@given(st.binary(max_size=300), st.integers(0, 64), st.integers(1, 50))
def test_beginning_and_end_are_kept(data: bytes, limit_bytes: int, chunk_bytes: int) -> None:
    output = collected(data, limit_bytes, chunk_bytes)
    assert output.truncated == (len(data) > limit_bytes)
    if not output.truncated:
        assert output.text() == plain_text(data.decode(errors="replace"))


def test_the_middle_is_left_out_and_counted() -> None:
    assert (
        collected(b"a" * 40 + b"b" * 1000 + b"c" * 40, 80).text() == "a" * 40 + "\n[1000 bytes left out]\n" + "c" * 40
    )
    assert collected(b"abc", 3).text() == "abc"
    assert collected(b"abc", 0).text() == "\n[3 bytes left out]\n"


def test_a_character_that_the_cut_went_through_is_left_out_whole() -> None:
    output = collected("é".encode() * 50, 2 * 7)  # seven bytes at each end: three characters and a half
    assert output.text() == "ééé\n[88 bytes left out]\nééé"


def test_a_cut_inside_an_escape_hides_nothing_behind_it() -> None:
    output = collected(b"head\x1b]0;" + b"x" * 100 + b"\x07tail", 16)
    assert output.text() == "head0;\n[97 bytes left out]\nxxxtail"


class Counted(Output):
    num_reads = 0

    def read(self) -> None:
        self.num_reads += 1
        super().read()


async def reading_to_the_end() -> tuple[str, int]:
    output = Counted()
    write_end = output.open()
    os.write(write_end, b"words")
    await asyncio.sleep(0.01)
    output.read()  # an empty pipe does not block
    os.close(write_end)
    await asyncio.sleep(0.05)
    output.close()
    output.close()
    return output.text(), output.num_reads


def test_the_reader_is_removed_at_the_end_of_the_stream() -> None:
    assert asyncio.run(reading_to_the_end()) == ("words", 3)
