"""Calls are read strictly: what is rendered reads back, what is broken stays broken, nothing else becomes a call."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.agent.chat import HERMES, render_call
from offbook.agent.chat.dialects import BASH, JSON, XML, Dialect
from offbook.agent.chat.dialects import parse_hermes as parse_calls
from offbook.types import ToolCall, ToolSpec

CONVERT = ToolSpec(
    "convert",
    "",
    {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "share": {"type": "number"},
            "all": {"type": "boolean"},
            "where": {"type": "object"},
            "lines": {"type": "array"},
            "limit": {"type": ["integer", "null"]},
            "either": {"type": ["integer", "string"]},
            "untyped": {},
        },
    },
)
TAGS = [
    "<tool_call>",
    "</tool_call>",
    '<tool_call>{"name": "finish", "arguments": {}}</tool_call>',
    "<think>",
    "</think>",
]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
TAGGED = TEXT | st.lists(st.sampled_from(TAGS) | TEXT, max_size=4).map("".join)
FENCED = TAGGED | st.just("```\n")
NAME = st.from_regex(r"\w+", fullmatch=True)
JSON_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TAGGED,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TAGGED, inner, max_size=3),
    max_leaves=6,
)


def only(dialect: Dialect, text: str, thinking: bool = False) -> ToolCall:
    (call,) = dialect.parse(text, (CONVERT,), thinking)
    return call


def xml_text(name: str, *parameters: str) -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


@given(st.lists(st.tuples(NAME, st.dictionaries(TAGGED, JSON_VALUE, max_size=3)), min_size=1, max_size=3))
def test_hermes_calls_read_back_tags_in_strings_and_all(calls: list[tuple[str, dict[str, Any]]]) -> None:
    text = "so " + " and ".join(HERMES.render(*call) for call in calls)
    found = HERMES.parse(text, (), False)
    assert [(call.name, call.arguments, call.error) for call in found] == [(*call, None) for call in calls]
    assert all(text.startswith("<tool_call>", call.start) for call in found)
    assert sorted({call.start for call in found}) == [call.start for call in found]


@given(st.lists(st.tuples(NAME, st.dictionaries(FENCED, JSON_VALUE, max_size=3)), min_size=1, max_size=3))
def test_json_calls_read_back_several_in_a_message_and_one_without_a_fence(
    calls: list[tuple[str, dict[str, Any]]],
) -> None:
    text = "I look:\n" + "\nand\n".join(JSON.render(*call) for call in calls) + "\n"
    found = JSON.parse(text, (), False)
    assert [(call.name, call.arguments, call.error) for call in found] == [(*call, None) for call in calls]
    assert all(text.startswith("```json", call.start) for call in found)
    bare = "\n" + JSON.render(*calls[0]).removeprefix("```json").removesuffix("```")
    call = only(JSON, bare)
    assert (call.name, call.arguments, bare[call.start]) == (*calls[0], "{")


UNSPEAKABLE = ("</parameter>", "<parameter=", "</function>")
VALUES = {
    "text": TAGGED,
    "count": st.integers(),
    "share": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    "all": st.booleans(),
    "where": st.dictionaries(TEXT, JSON_VALUE, max_size=2),
    "lines": st.lists(JSON_VALUE, max_size=2),
    "limit": st.integers() | st.none(),
    "either": TEXT,
    "untyped": TEXT,
}


@given(st.lists(st.fixed_dictionaries({}, optional=VALUES), min_size=1, max_size=2))
def test_xml_calls_read_back_with_their_types(calls: list[dict[str, Any]]) -> None:
    if any(tag in str(value) for each in calls for value in each.values() for tag in UNSPEAKABLE):
        return
    text = "so\n" + "\n".join(XML.render("convert", arguments) for arguments in calls)
    found = XML.parse(text, (CONVERT,), False)
    assert [(call.name, call.arguments, call.error) for call in found] == [("convert", each, None) for each in calls]
    kinds = [{key: type(value) for key, value in call.arguments.items()} for call in found]
    assert kinds == [{key: type(value) for key, value in each.items()} for each in calls]


@given(TEXT | st.sampled_from(["ls ```x", "<tool_call>", "a\n\n```", "```", "\n", "cat <<E\n```\nE"]), TEXT)
def test_bash_commands_read_back_and_as_mini_swe_agent_reads_them(command: str, thought: str) -> None:
    try:
        text = f"{thought}\n{BASH.render('bash', {'command': command})}\n"
    except ValueError:
        assert not command.strip() or any(line.startswith("```") for line in command.split("\n"))
        return
    if "```" in thought or thought.lstrip().startswith("<think>"):
        return
    assert only(BASH, text) == ToolCall("bash", {"command": command}, start=len(thought) + 1)
    assert [found.strip() for found in re.findall(r"```bash\s*\n(.*?)\n```", text, re.DOTALL)] == [command.strip()]


GOOD = render_call("read_file", {"path": "a"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool_call>{"name": "read_file", "arguments": {"path": "a"}', "not closed"),
        ('<tool_call>{"name": "read_file", "arguments": {"path": "a"}}', "not closed"),
        ('<tool_call>{"name": "read_file", "arguments": {"path": "a"}</tool_call>', "not valid JSON"),
        ('<tool_call>{"name": "read_file", "arguments": {"path": "a", "path": "b"}}</tool_call>', "twice"),
        ('<tool_call>{"name": "x", "name": "read_file", "arguments": {}}</tool_call>', "twice"),
        ('<tool_call>{"name": "read_file", "arguments": {"line": NaN}}</tool_call>', "NaN"),
        ('<tool_call>{"name": "read_file", "arguments": {"line": 1e999}}</tool_call>', "too large"),
        ('<tool_call>{"name": "read_file", "arguments": {"line": ' + "1" * 5000 + "}}</tool_call>", "too long"),
        ('<tool_call>{"name": "read_file", "arguments": {"a": ' + "[" * 99999 + "}}</tool_call>", "nested too deeply"),
        ('<tool_call>{"name": "read_file", "arguments": {"path": "\\ud83d"}}</tool_call>', "half a character"),
        ('<tool_call>{"name": "read_file", "arguments": {"path": "a\nb"}}</tool_call>', "control character"),
        ('<tool_call>{"name": "read_file", "arguments": {}} now</tool_call>', "only </tool_call> may follow"),
        (f"<tool_call>{GOOD}</tool_call>", "inside a call"),
        (f'<tool_call>{{"name": "read_file", "arguments": {{}}}}{GOOD}</tool_call>', "only </tool_call> may follow"),
        ('<tool_call>{"name": "read_file", "arguments": {}, "id": 1}</tool_call>', "nothing else"),
        ('<tool_call>{"name": "read_file"}</tool_call>', "needs arguments"),
        ('<tool_call>{"name": "read_file", "arguments": "a"}</tool_call>', "needs arguments"),
        ('<tool_call>{"arguments": {}}</tool_call>', "needs a name"),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', "needs a name"),
        ("<tool_call>[1]</tool_call>", "needs a name"),
        ('{"arguments": {}}</tool_call>', "begin the call with <tool_call>"),
    ],
)
def test_a_broken_hermes_call_is_kept_with_its_reason(text: str, reason: str) -> None:
    call = only(HERMES, text)
    assert reason in (call.error or "")
    assert call.arguments == {}
    assert call.name in (("read_file", "x") if "read_file" in text else ("",))


@pytest.mark.parametrize(
    ("text", "reason", "name"),
    [
        (xml_text("convert", parameter("count", "1.0")), "count must be integer", "convert"),
        (xml_text("convert", parameter("count", "true")), "count must be integer", "convert"),
        (xml_text("convert", parameter("count", '"1"')), "count must be integer", "convert"),
        (xml_text("convert", parameter("count", "1 2")), "count must be integer", "convert"),
        (xml_text("convert", parameter("share", "NaN")), "share must be number", "convert"),
        (xml_text("convert", parameter("share", "false")), "share must be number", "convert"),
        (xml_text("convert", parameter("all", "True")), "all must be boolean", "convert"),
        (xml_text("convert", parameter("where", '{"a": 1, "a": 2}')), "where must be object", "convert"),
        (xml_text("convert", parameter("where", "[]")), "where must be object", "convert"),
        (xml_text("convert", parameter("limit", "none")), "limit must be integer or null", "convert"),
        (xml_text("convert", parameter("text", "a"), parameter("text", "b")), "text is there twice", "convert"),
        (xml_text("convert", parameter("file", "a")), "convert takes no file", "convert"),
        (xml_text("convert", "<parameter=text>a\n"), "not closed by </parameter>", "convert"),
        (xml_text("convert", "<parameter=text>a\n", parameter("count", "1")), "not closed by </parameter>", "convert"),
        (xml_text("convert", parameter("text", "a"), "b"), "after the parameter text", "convert"),
        (xml_text("convert", '<parameter="text">a</parameter>'), "after <function=NAME>", "convert"),
        (xml_text("convert", parameter("text", "a</parameter>b")), "after the parameter text", "convert"),
        (xml_text('convert" id="1', parameter("text", "a")), "write <function=NAME>", ""),
        ("<tool_call><function=convert></function>", "after <function=NAME>", "convert"),
        ("<tool_call><function=convert></function>x</tool_call>", "after <function=NAME>", "convert"),
        (f"<tool_call>{xml_text('convert')}</tool_call>", "write <function=NAME>", ""),
        (GOOD, "write <function=NAME>", ""),
        ("<function=convert></function></tool_call>", "begin the call with <tool_call>", ""),
    ],
)
def test_a_broken_xml_call_is_kept_with_its_reason(text: str, reason: str, name: str) -> None:
    call = only(XML, text)
    assert reason in (call.error or "")
    assert (call.name, call.arguments) == (name, {})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("```bash\nls\n```\n```bash\npwd\n```", "2 command blocks"),
        ("```mswea_bash_command\nls\n```\n```bash\npwd\n```", "2 command blocks"),
        ("```bash\nls", "not closed"),
        ("```bash\nls ```", "not closed"),
        ("```bash", "not closed"),
        ("run ```bash\nls\n```", "not closed, or not the last"),
        ("```bash -x\nls\n```", "not closed, or not the last"),
        ("```bash\nls\n```x", "not closed, or not the last"),
        ("```bash\ncat <<E\n```\ncode\n```\nE\n```", "not closed, or not the last"),
        ("```bash\ncat <<E\n```python\ncode\n```\nE\n```", "not closed, or not the last"),
        ("```bash\nls\n```\nwhich gives\n```\na.py\n```", "not closed, or not the last"),
        ("```bash\n```", "empty"),
        ("```bash\n \n```", "empty"),
    ],
)
def test_a_broken_command_is_kept_with_its_reason(text: str, reason: str) -> None:
    call = only(BASH, text)
    assert reason in (call.error or "")
    assert (call.name, call.arguments) == ("bash", {})


LOOK = '{"name": "read_file", "arguments": {"path": "a"}}'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"```json\n{LOOK}", "not closed"),
        (f"```json\n{LOOK} ```", "not closed"),
        (f"```\n{LOOK}\n```", "must begin with ```json"),
        (f"```tool_call\n{LOOK}\n```", "must begin with ```json"),
        (f"```json\n[{LOOK}]\n```", "only the JSON object"),
        (f"```json\n{LOOK}\n{LOOK}\n```", "only the JSON object"),
        (f"{LOOK}\nThis reads the file.", "only the JSON object"),
        (f"{LOOK}\n```json\n{LOOK}\n```", "only the JSON object"),
        ('```json\n{"name": "read_file", "arguments": {"path": "a"\n```', "not valid JSON"),
        ('```json\n{"name": "read_file", "arguments": {"path": "a\nb"}}\n```', "control character"),
        ('```json\n{"name": "read_file", "arguments": {}, "name": "x"}\n```', "twice"),
        ('{"name": "read_file", "arguments": {"path": "a",}}', "not valid JSON"),
        ('```json\n{"name": "read_file", "arguments": "a"}\n```', "needs arguments"),
        ('```json\n{"name": "read_file", "arguments": {}, "id": 1}\n```', "nothing else"),
    ],
)
def test_a_broken_json_call_is_kept_with_its_reason(text: str, reason: str) -> None:
    call = only(JSON, text)
    assert reason in (call.error or "")
    assert call.arguments == {}
    assert call.name in ("read_file", "convert")


ANSWERS = [  # of agents that are done, with JSON and tags in them
    'The setting is\n```json\n{"name": "toolz", "version": "1.0"}\n```\nin package.json.',
    '```json\n[{"name": "a"}, {"arguments": []}]\n```',
    '```json\n{"functions": [{"name": "f", "arguments": {}}]}\n```',
    '```json\n{"name": "a" and so on\n```',
    '```python\n{"name": "read_file", "arguments": {}}\n```\nis a dict.',
    '{"solved": true}',
    "{} is an empty dict.",
    "```bash\npytest -q\n```",
    "```\n1 passed\n```\nand so `read_file` works.",
    'Calls are JSON with "name": "x" and "arguments".',
]


@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer_that_shows_json_stays_an_answer(text: str) -> None:
    for dialect in (HERMES, XML, JSON):
        assert dialect.read(text, (CONVERT,), False) == ()
    if "```bash" not in text:
        assert BASH.read(text, (), False) == ()


IN_XML = "<tool_call>\n<function=read_file>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "others"),
    [
        (f"I look.\n```json\n{LOOK}\n```", (HERMES, XML, BASH)),
        (LOOK, (HERMES, XML, BASH)),
        (f"```\n{LOOK}\n```", (HERMES, XML, BASH)),
        (f"I look. {GOOD}", (JSON, BASH)),
        (IN_XML, (JSON, BASH)),
        (IN_XML.replace("<tool_call>\n", "").replace("\n</tool_call>", ""), (HERMES, XML, JSON, BASH)),
    ],
)
def test_an_attempt_in_another_dialect_is_a_malformed_call_that_says_how(
    text: str, others: tuple[Dialect, ...]
) -> None:
    for dialect in others:
        assert dialect.parse(text, (), False) == ()
        (call,) = dialect.read(f"<think>{text}</think>{text}", (CONVERT,), False)
        assert (call.name, call.arguments, call.other_dialect) == ("read_file", {}, True)
        assert call.start > len(f"<think>{text}")
        assert dialect.how in (call.error or "")
        assert dialect.read(f"<think>{text}", (CONVERT,), False) == ()
    own = {HERMES: GOOD, XML: IN_XML, JSON: f"```json\n{LOOK}\n```", BASH: "```bash\nls\n```"}
    for dialect in others:  # where a call is read, others are text
        assert not any(call.other_dialect for call in dialect.read(f"{text}\n{own[dialect]}", (), False))


def test_a_call_without_an_end_ends_the_reading_and_a_closed_one_does_not() -> None:
    wrong = '<tool_call>{"name": "a"}</tool_call>'
    assert [call.error is None for call in parse_calls(GOOD + wrong + GOOD)] == [True, False, True]
    open_ended = '<tool_call>{"name": "a", "arguments": {"new": "x</tool_call>'
    assert [call.error is None for call in parse_calls(GOOD + open_ended + GOOD)] == [True, False]
    stray = f'{{"name": "a"}}</tool_call>{GOOD}'
    assert [call.error is None for call in parse_calls(stray)] == [False, True]
    bad_value, good = xml_text("convert", parameter("count", "x")), xml_text("convert", parameter("count", "1"))
    assert [call.error is None for call in XML.parse(bad_value + good, (CONVERT,), False)] == [False, True]
    unclosed = "<tool_call><function=convert><parameter=count>1"
    assert [call.error is None for call in XML.parse(unclosed + good, (CONVERT,), False)] == [False]


@pytest.mark.parametrize("dialect", [HERMES, XML, JSON, BASH])
def test_thinking_is_not_searched_for_calls(dialect: Dialect) -> None:
    arguments = {"command": "ls"}
    call = "\n" + dialect.render("bash", arguments)
    assert only(dialect, f"<think>maybe{call}\n</think>{call}").start > len(f"<think>maybe{call}")
    assert dialect.parse(f" <think>maybe{call}", (), False) == ()
    assert dialect.parse(f"maybe{call}", (), True) == ()
    assert only(dialect, f"maybe{call}\n</think>{call}", thinking=True).arguments == arguments
    # a later mark is text: code may contain it
    assert only(dialect, f"I say <think>{call}").arguments == arguments
    assert only(dialect, f"</think>{call}").arguments == arguments


@pytest.mark.parametrize("value", UNSPEAKABLE)
def test_what_a_dialect_cannot_say_is_not_written(value: str) -> None:
    with pytest.raises(ValueError, match="tag"):
        XML.render("convert", {"text": value})
    for name, arguments in [
        ("grep", {"command": "ls"}),
        ("bash", {"command": "ls", "cwd": "."}),
        ("bash", {"command": " "}),
    ]:
        with pytest.raises(ValueError, match="bash commands"):
            BASH.render(name, arguments)
