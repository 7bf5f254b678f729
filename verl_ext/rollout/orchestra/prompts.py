# SPDX-License-Identifier: Apache-2.0
"""From an agent and its messages to a prompt that fits: role, examples, and what is left out of what is too long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_ext.rollout.orchestra.agents import Agent

CUT = "\n[...]\n"
"""Stands where the middle of a message was taken out."""
CHARACTERS_A_TOKEN = 32
"""Characters a token that a text is taken to have at most, before it is tokenised."""


def with_role(agent: Agent, messages: Sequence[Mapping[str, Any]], role_as: str) -> list[dict[str, Any]]:
    """The whole conversation: role, the messages' own system messages, examples, and the other messages."""
    body = [dict(message) for message in messages]
    shown = [
        {"role": role, "content": text}
        for example in agent.examples
        for role, text in (("user", example.user), ("assistant", example.assistant))
    ]
    first = next((i for i, message in enumerate(body) if message.get("role") != "system"), len(body))
    body[first:first] = shown
    if not agent.role:
        return body
    if role_as == "system":
        return [{"role": "system", "content": agent.role}, *body]
    for message in body:
        if message.get("role") == "user":
            message["content"] = f"{agent.role}\n\n{message['content']}"
            return body
    return [{"role": "user", "content": agent.role}, *body]


def halves(text: str, kept: int) -> str:
    """The first and the last of a text, `kept` characters together."""
    return text[: kept - kept // 2] + CUT + text[len(text) - kept // 2 :]


def bound(messages: Sequence[Mapping[str, Any]], limit: int) -> tuple[list[dict[str, Any]], bool]:
    """Messages whose texts are not worth tokenising for `limit` tokens lose their middle; whether any did."""
    most, bounded, cut = CHARACTERS_A_TOKEN * limit, [], False
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and len(content) > most:
            message, cut = {**message, "content": halves(content, most)}, True
        bounded.append(dict(message))
    return bounded, cut


def shorten(
    messages: Sequence[Mapping[str, Any]], tokens: Callable[[Sequence[Mapping[str, Any]]], list[int]], limit: int
) -> list[int] | None:
    """Tokens of the messages, the longest of them cut in the middle until all fits in `limit` tokens.

    Args:
        messages: chat messages; those whose content is not text stay whole.
        tokens: makes prompt tokens of messages.
        limit: tokens that fit.

    Returns:
        The tokens, with as much text as fits; None if it does not fit without any.
    """
    body = [dict(message) for message in messages]
    texts = [i for i, message in enumerate(body) if isinstance(message.get("content"), str)]
    for i in sorted(texts, key=lambda i: len(body[i]["content"]), reverse=True):
        text = body[i]["content"]

        def cut(kept: int, i: int = i, text: str = text) -> list[int]:
            body[i]["content"] = halves(text, kept)
            return tokens(body)

        ids = cut(0)
        if len(ids) > limit:
            continue  # this message is down to its mark; the next longest is cut too
        low, high = 0, len(text)
        while high - low > 1:
            middle = (low + high) // 2
            longer = cut(middle)
            if len(longer) <= limit:
                low, ids = middle, longer
            else:
                high = middle
        return ids
    return None
