# SPDX-License-Identifier: Apache-2.0
"""Messages in a form that a chat template takes. What it would leave out is put where it shows it, or refused by name.

- Content in parts becomes one text, content that is None an empty one; a part that is no text is refused.
- ``developer`` is ``system`` where the template knows no difference; a system message that it refuses or leaves out
  there, at the beginning or late, is the user's.
- Neighbouring system messages are joined, and where user and assistant must alternate, neighbours of those roles too.
- Calls of tools have their arguments as the template wants them (an object or JSON), ids of nine letters and digits
  where it wants those, and stand one in a message where it takes one. Calls that it does not show are words of the
  answer, and what a tool says is the user's where it knows no tools.
- Any other role that it does not show is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from hashlib import blake2s
from typing import Any

from verl_ext.common.log_filter import Once
from verl_ext.rollout.shared.probes import Probes, Refusal

logger = logging.getLogger(__name__)
logger.addFilter(Once())


def fit(probes: Probes, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages in a form that the template takes; see the module's text. Raises Refusal: one can't be."""
    made = [of_text(message) for message in messages]
    if probes.own:
        made = _roles(probes, made)
        made = _calls(probes, made)
    made = _joined(probes, made)
    if any(message.get("tool_calls") or message.get("tool_call_id") for message in made) and probes.nine:
        made = [_with_nine(message) for message in made]
    return made


def of_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its content as one text. Raises Refusal: it has a part that is no text."""
    content, role = message.get("content"), message.get("role")
    if not isinstance(role, str):
        raise Refusal(f"the role of a message is {role!r}; it is a text, such as 'user'")
    kept = {key: value for key, value in message.items() if key != "tool_calls" or value}
    if content is None:
        return {**kept, "content": ""}
    if isinstance(content, str):
        return kept
    if not isinstance(content, list | tuple):
        raise Refusal(f"the content of a message of the {role} is a {type(content).__name__}; it is text")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise Refusal(
                f"a message of the {role} has a block of the type {kind!r}; the agent loops of verl_ext "
                "read text only. Use verl's own agent loops for images, videos and sound."
            )
        texts.append(str(part.get("text") or ""))
    return {**kept, "content": "".join(texts)}


def _roles(probes: Probes, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    early = True
    for message in messages:
        role = message["role"]
        if role == "developer" and not (early and probes.developer):
            role = "system"
        if role == "system" and not (probes.system if early else probes.late_system):
            role = "user"
        if role not in ("system", "developer", "user", "assistant", "tool") and (why := probes.shows_role(role)):
            raise Refusal(f"the chat template does not take a message of the role {role!r}: {why}")
        early = early and role in ("system", "developer")
        made.append({**message, "role": role})
    return made


def _joined(probes: Probes, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    joined: list[dict[str, Any]] = []
    for message in messages:
        before = joined[-1] if joined else {}
        role = message["role"]
        # gpt-oss has one place for both.
        systems = {"system", "developer"} >= {role, before.get("role")}
        turns = role == before.get("role") and role in ("user", "assistant") and probes.alternates
        if (systems or turns) and not (message.get("tool_calls") or before.get("tool_calls")):
            both = [one["content"] for one in (before, message) if one["content"]]
            joined[-1] = {**before, "content": "\n\n".join(both)}
        else:
            joined.append(message)
    return joined


def _calls(probes: Probes, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
        return messages
    form, made = probes.calls, list[dict[str, Any]]()
    messages = _with_ids(messages)
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls")
        if calls and (form is None or (message["content"] and not probes.calls_beside)):
            made.append(_in_words(message))
        elif calls and form is not None:
            if message["content"] and not probes.beside:
                logger.warning("the chat template leaves out what an answer says beside a call of a tool")
            given = [_in_form(form, call) for call in calls]
            answers = []
            while at < len(messages) and messages[at]["role"] == "tool":
                answers.append(messages[at])
                at += 1
            groups = [(given, answers)] if len(given) == 1 or probes.parallel else _one_by_one(given, answers)
            for place, (some, theirs) in enumerate(groups):
                content = message["content"] if place == 0 else ""
                made.append({**message, "content": content or form.content, "tool_calls": some})
                made += [_told(probes, answer) for answer in theirs]
        else:
            made.append(_told(probes, message) if message["role"] == "tool" else message)
    return made


def _with_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with an id for each call, and for each answer that of the call in its place."""
    made, waiting, count = list[dict[str, Any]](), list[str](), 0
    for message in messages:
        if calls := message.get("tool_calls"):
            waiting = [str(call.get("id") or f"call{count + place:05d}") for place, call in enumerate(calls)]
            named = [{**call, "id": name} for call, name in zip(calls, waiting, strict=True)]
            message, count = {**message, "tool_calls": named}, count + len(calls)
        elif message["role"] == "tool" and waiting:
            name = str(message.get("tool_call_id") or waiting[0])
            waiting = [one for one in waiting if one != name]
            message = {**message, "tool_call_id": name}
        made.append(message)
    return made


def _in_form(form: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise Refusal("a call of a tool has no function; it is {type: function, function: {name, arguments}}")
    given = function.get("arguments")
    arguments = form.arguments({} if given is None else given)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _one_by_one(
    calls: list[dict[str, Any]], answers: list[dict[str, Any]]
) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Each call with its answers: those of its id, or the one in its place."""
    names = [call.get("id") for call in calls]
    groups: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [([call], []) for call in calls]
    for place, answer in enumerate(answers):
        name = answer.get("tool_call_id")
        groups[names.index(name) if name in names else min(place, len(calls) - 1)][1].append(answer)
    return groups


def _in_words(message: dict[str, Any]) -> dict[str, Any]:
    """An answer with its calls as words, as the format `hermes` has them."""
    written = []
    for call in message["tool_calls"]:
        function = call.get("function") or {}
        given = function.get("arguments")
        arguments = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
        name = json.dumps(function.get("name"), ensure_ascii=False)
        written.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join([*filter(None, [message["content"]]), *written])}


def _told(probes: Probes, answer: dict[str, Any]) -> dict[str, Any]:
    """What a tool says; as the user's words where the template knows no tools."""
    if not probes.tools:
        return answer
    return {"role": "user", "content": f"<tool_response>\n{answer['content']}\n</tool_response>"}


def _with_nine(message: dict[str, Any]) -> dict[str, Any]:
    """The message with ids of nine letters and digits; equal ids stay equal."""

    def nine(name: Any) -> str:
        text = str(name)
        fits = len(text) == 9 and text.isascii() and text.isalnum()
        return text if fits else blake2s(text.encode("utf-8", "replace")).hexdigest()[:9]

    if message.get("tool_call_id") is not None:
        message = {**message, "tool_call_id": nine(message["tool_call_id"])}
    if calls := message.get("tool_calls"):
        named = [{**call, "id": nine(call.get("id", place))} for place, call in enumerate(calls)]
        message = {**message, "tool_calls": named}
    return message
