# SPDX-License-Identifier: Apache-2.0
"""OpenAI's requests and answers: what a client asks for, checked, and what it is told.

The names are those of OpenAI's reference of ``/v1/chat/completions`` and ``/v1/completions``. What is not known is
refused by name, since a parameter that is left out in silence would be trained on as if it had been heeded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_ext.rollout.gateway.settings import NAME
from verl_ext.rollout.shared.tools import arguments_of

#: Sampling parameters that an engine of verl takes, with the value that changes nothing.
SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
#: What every engine takes of them, the ends included: of `top_k` whole numbers, of the others any.
RANGES = {
    "temperature": (0.0, 1e6),
    "top_p": (1e-6, 1.0),
    "top_k": (-1, 1e6),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-6, 1e6),
}
#: Others that would change what is sampled, with the values that do not; they can be left out, but not used.
FIXED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "reasoning_effort": (),
    "echo": (False,),
    "suffix": ("",),
}
ASKED = {"model", "messages", "prompt", "max_tokens", "max_completion_tokens", "stop", "seed", "stream"} | {
    *("stream_options", "logprobs", "top_logprobs", "tools", "parallel_tool_calls"),
    *SAMPLING,
    *FIXED,
}
WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Refused(Exception):
    """A request that is answered with an error.

    Attributes:
        status: HTTP status.
        code: in one word, for programs.
    """

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        agent: who asks: the header ``X-Agent-Id``, or the name of the ``model``.
        messages: of a chat, with the fields that chat templates read; for a text completion one with its prompt.
        prompt: of a text completion: text or token ids; None for a chat.
        tools: their schemas, as sent.
        limit: tokens of the answer; None: as many as the run allows.
        stop: texts before which the answer ends.
        seed: of the sampler.
        logprobs: tell the log-probability of each token.
        stream: answer with events; the last has the numbers of tokens if `usage`.
        one_tool: keep the first tool call only.
        sampling: parameters of `SAMPLING` that are not the run's.
        fixed: names of parameters of `FIXED` that are not as they must be.
    """

    agent: str
    messages: list[dict[str, Any]]
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    limit: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    stream: bool = False
    usage: bool = False
    one_tool: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()


def parse(body: bytes, header: str | None, chat: bool, runs: Sequence[Mapping[str, Any]]) -> Asked:
    """A request, checked.

    Args:
        body: JSON.
        header: ``X-Agent-Id``.
        chat: of ``/v1/chat/completions``.
        runs: sampling parameters that are the run's own, now and in training.

    Raises:
        Refused: it is no such request.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise Refused("the body must be an object")
    given = {key: value for key, value in given.items() if value is not None}
    unknown = sorted(set(given) - ASKED - WITHOUT_EFFECT)
    if unknown:
        raise Refused(f"{unknown[0]!r:.80} is not a parameter that the gateway takes")
    agent = header or _of(given, "model", str, "")
    if not NAME.fullmatch(agent):
        raise Refused(f"the name of the model (or X-Agent-Id) is {agent!r:.80}; give at most 64 of A-Z a-z 0-9 _.:/@+-")
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    stop = _of(given, "stop", list, [])
    if not all(isinstance(one, str) and one for one in stop) or len(stop) > 16:
        raise Refused("stop must be a text or at most 16 texts")
    limit = _of(given, "max_completion_tokens", int, _of(given, "max_tokens", int, None))
    if limit is not None and limit < 1:
        raise Refused(f"max_tokens is {limit}; it must be at least 1")
    seed = _of(given, "seed", int, None)
    if seed is not None and not 0 <= seed < 2**63:
        raise Refused(f"seed is {seed}; it must be from 0 to 2^63 - 1")
    if given.get("top_logprobs") or given.get("logprobs", False) not in (False, True):  # 0 and 1 are among these
        raise Refused("the log-probabilities of other tokens can't be had; logprobs gives those of the sampled ones")
    prompt = None if chat else _prompt(given.get("prompt"))
    said = {"role": "user", "content": prompt if isinstance(prompt, str) else ""}
    messages = [_message(one) for one in _of(given, "messages", list, [])] if chat else [said]
    if not messages:
        raise Refused("messages is empty")
    tools = [_tool(one) for one in _of(given, "tools", list, [])]
    return Asked(
        agent=agent,
        messages=messages,
        prompt=prompt,
        tools=[] if given.get("tool_choice") == "none" else tools,
        limit=limit,
        stop=tuple(stop),
        seed=seed,
        logprobs=given.get("logprobs", False) is not False,
        stream=_of(given, "stream", bool, False),
        usage=bool(_of(given, "stream_options", dict, {}).get("include_usage")),
        one_tool=given.get("parallel_tool_calls") is False,
        sampling={name: _number(given, name) for name in SAMPLING if name in given and not _runs(given, name, runs)},
        fixed=tuple(name for name in FIXED if name in given and given[name] not in FIXED[name]),
    )


def _of(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = given.get(name, default)
    if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise Refused(f"{name} is {value!r:.80}; it must be a {kind.__name__}")
    return value


def _number(given: Mapping[str, Any], name: str) -> float | int:
    value = given[name]
    low, high = RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise Refused(f"{name} is {value!r:.80}; it must be a number from {low:g} to {high:g}")
    if name == "top_k" and value != int(value):
        raise Refused(f"top_k is {value}; it must be a whole number")
    return value


def _runs(given: Mapping[str, Any], name: str, runs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a sampling parameter is the run's own."""
    return any(_number(given, name) == run.get(name, SAMPLING[name]) for run in runs)


def _prompt(given: Any) -> str | list[int]:
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given and all(type(token) is int for token in given):
        return given
    raise Refused("prompt must be one text or the token ids of one")


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(_of(part, "text", str, "") for part in content)
    if not isinstance(content, str):
        raise Refused("the content of a message must be text, or parts of the type text")
    return content


def _message(given: Any) -> dict[str, Any]:
    """A message with what chat templates read of it."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str) or given["role"] not in ROLES:
        raise Refused(f"a message must have a role of {', '.join(ROLES)}, and content")
    message: dict[str, Any] = {"role": ROLES[given["role"]], "content": _text(given.get("content"))}
    if message["role"] == "assistant" and given.get("tool_calls"):
        message["tool_calls"] = [_tool_call(one) for one in _of(given, "tool_calls", list, [])]
    if message["role"] == "tool" and isinstance(given.get("tool_call_id"), str):
        message["tool_call_id"] = given["tool_call_id"]
    return message


def _tool_call(given: Any) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused("a tool call must have a function with a name and arguments")
    made = {"function": {"name": function["name"], "arguments": arguments_of(function.get("arguments") or "{}")}}
    return {"type": "function", **made, **({"id": given["id"]} if isinstance(given.get("id"), str) else {})}


def _tool(given: Any) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused("a tool must be {type: function, function: {name, description, parameters}}")
    return {"type": "function", "function": function}


@dataclass(frozen=True)
class Answer:
    """What a request gets.

    Attributes:
        id: of the completion; rewards of single calls are given by it.
        asked: the request.
        text: without special tokens, tool calls and what follows a stop text.
        finish: ``stop``, ``length`` or ``tool_calls``.
        prompt_tokens, tokens: how many of each.
        cached: tokens of the prompt that the engine had in its prefix cache; None if it does not say.
        tool_calls: as OpenAI's messages have them.
        logprobs: (token's text, log-probability) of each token; None if not asked for.
    """

    id: str
    asked: Asked
    text: str
    finish: str
    prompt_tokens: int
    tokens: int
    cached: int | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[tuple[str, float]] | None = None

    def _whole(self, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        name = kind if self.asked.prompt is None else "text_completion"
        head = {"id": self.id, "object": name, "created": int(time.time()), "model": self.asked.agent}
        return {**head, "choices": [{"index": 0, "finish_reason": None, "logprobs": None, **choice}]}

    def _usage(self) -> dict[str, Any]:
        total = self.prompt_tokens + self.tokens
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens, "total_tokens": total}
        return usage if self.cached is None else {**usage, "prompt_tokens_details": {"cached_tokens": self.cached}}

    def _logprobs(self) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        if self.asked.prompt is not None:
            texts, numbers = [text for text, _ in self.logprobs], [number for _, number in self.logprobs]
            return {"tokens": texts, "token_logprobs": numbers, "top_logprobs": None, "text_offset": None}
        content = [
            {"token": text, "logprob": number, "bytes": list(text.encode()), "top_logprobs": []}
            for text, number in self.logprobs
        ]
        return {"content": content, "refusal": None}

    def whole(self) -> dict[str, Any]:
        """The answer to a request without ``stream``."""
        said: dict[str, Any] = {"text": self.text}
        if self.asked.prompt is None:
            message = {"role": "assistant", "content": self.text if self.text or not self.tool_calls else None}
            said = {"message": {**message, **({"tool_calls": self.tool_calls} if self.tool_calls else {})}}
        choice = {**said, "finish_reason": self.finish, "logprobs": self._logprobs()}
        return {**self._whole("chat.completion", choice), "usage": self._usage()}

    def events(self) -> Iterator[str]:
        """The same as server-sent events: verl's engines give an answer when it is whole."""
        chat = self.asked.prompt is None
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}] if chat else []
        if self.text:
            deltas.append({"content": self.text})
        deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(self.tool_calls)]
        choices = [{"delta": delta} if chat else {"text": delta["content"]} for delta in deltas]
        last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        choices.append({**last, "finish_reason": self.finish, "logprobs": self._logprobs()})
        for choice in choices:
            yield f"data: {json.dumps(self._whole('chat.completion.chunk', choice))}\n\n"
        if self.asked.usage:
            whole = {**self._whole("chat.completion.chunk", {}), "choices": [], "usage": self._usage()}
            yield f"data: {json.dumps(whole)}\n\n"
        yield "data: [DONE]\n\n"
