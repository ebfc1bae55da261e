"""Conversations of recorded episodes: calls of tools, their results, and what is no call."""

import json

from trinity_events.record.conversation import build_policy_row, build_row, link_calls, to_chat
from trinity_schemas import ChatMessage

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "tea"}}\n</tool_call>'


def test_calls_in_a_policys_text_become_calls_of_tools():
    row = build_policy_row(f"Let me see.\n{CALL}\n{CALL}", 1)
    assert row["content"] == "Let me see."
    assert [call["name"] for call in row["tool_calls"]] == ["search", "search"]
    [message] = to_chat([row])
    assert message["tool_calls"][0] == {
        "type": "function",
        "function": {"name": "search", "arguments": {"query": "tea"}},
    }


def test_text_that_is_no_call_stays_as_it_is():
    for text in (
        "<tool_call>search tea</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": "search"',
        " plain ",
    ):
        row = build_policy_row(text, 1)
        assert (row["content"], row["tool_calls"]) == (text, [])


def test_a_call_that_an_environment_reports_is_the_policys():
    result = ChatMessage(role="tool", content="42", name="calc", arguments="6 * 7")
    rows = [build_policy_row("calc(6 * 7)", 1), build_row(result, 2)]
    link_calls(rows)
    policy, tool = to_chat(rows)
    assert policy["content"] == "calc(6 * 7)"
    [call] = policy["tool_calls"]
    assert call["function"] == {"name": "calc", "arguments": "6 * 7"}
    assert tool == {"role": "tool", "content": "42", "name": "calc"}


def test_calls_are_not_reported_twice():
    result = ChatMessage(role="tool", content="green", name="search", arguments='{"query": "tea"}')
    rows = [build_policy_row(CALL, 1), build_row(result, 2)]
    link_calls(rows)
    assert len(rows[0]["tool_calls"]) == 1


def test_calls_of_a_prompts_examples_are_kept():
    calls = [{"id": "c1", "function": {"name": "search", "arguments": '{"query": "tea"}'}}]
    message = ChatMessage(role="assistant", tool_calls=json.dumps(calls))
    [row] = to_chat([build_row(message, 0)])
    assert row["tool_calls"][0]["id"] == "c1"
    assert row["tool_calls"][0]["function"]["arguments"] == {"query": "tea"}
