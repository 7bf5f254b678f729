# SPDX-License-Identifier: Apache-2.0
"""What a model's chat template takes and writes: how a turn ends, which messages it refuses, what comes next.

Everything is asked of the template by rendering short conversations, so that nothing here knows a family by name. An
agent loop has its model's `Chat` (:class:`ChatLoop`) and uses two things of it:

- :meth:`Chat.fit` puts messages into a form that the template takes: neighbouring system messages are joined, and where
  it insists on user and assistant in turns, neighbouring messages of the user too; ids of tool calls are made nine
  letters and digits where it wants those.
- :meth:`Chat.follow` is the next prompt of a conversation that goes on: the tokens so far, untouched, what is missing
  to the end of the turn (an answer that was cut has no end), and the new messages. What follows an answer is the
  template's own text after an answer. Only what tools say is encoded by verl's token builder, which knows the formats
  of calls.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from hashlib import blake2s
from typing import Any

from jinja2.exceptions import TemplateError
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from verl_ext.common.log_filter import Once
from verl_ext.common.thinking import MARKS, said
from verl_ext.integration.compat.verl_api import merge_context

logger = logging.getLogger(__name__)
logger.addFilter(Once())

#: Stands for an answer in a conversation that is rendered to see what the template writes around one.
MARK = "theanswerstandshere"
ASKED = {"role": "user", "content": "question"}
ANSWERED = {"role": "assistant", "content": MARK}
SYSTEM = {"role": "system", "content": "rules"}
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "looks up a word",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "a word"}}},
    },
}
ID = "call00000"
LONG_ID = "call_0123456789abcdef01234567"


def called(content: Any, arguments: Any, name: str = ID) -> dict[str, Any]:
    """A message that calls `TOOL`."""
    call = {"type": "function", "id": name, "function": {"name": "lookup", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


#: The ways in which templates take a call: arguments as an object or as JSON, with content or with none.
CALLED = (
    ("", {"word": MARK}),
    (None, json.dumps({"word": MARK})),
    (None, {"word": MARK}),
    ("", json.dumps({"word": MARK})),
)
HEARD = {"role": "tool", "content": "a tool's words", "name": "lookup", "tool_call_id": ID}


class Refusal(ValueError):
    """A chat template does not take a conversation; the message has its own words."""


def words(error: BaseException) -> str:
    """What a chat template said when it refused, under the errors that came of it.

    verl renders a refused conversation once more with a message of its own before it, and it is the error of that which
    arrives.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, TemplateError | Refusal):
            return str(seen)
        error, seen = seen, seen.__cause__ or seen.__context__
    return f"{type(error).__name__}: {error}"


class Chat:
    """The chat template of one model.

    Args:
        tokenizer: with the template.
        builder: verl's token builder of the model.

    Attributes:
        own: whether there is a template; without one (DeepSeek-V4) verl's builder does everything.
    """

    def __init__(self, tokenizer: Any, builder: Any) -> None:
        self.tokenizer, self.builder = tokenizer, builder
        given = dict(builder.chat_template_kwargs)  # data.apply_chat_template_kwargs
        self.kwargs = {k: v for k, v in given.items() if k not in ("tokenize", "return_dict", "return_tensors")}
        self.own = bool(getattr(tokenizer, "chat_template", None))
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.added = {*map(int, added), *tokenizer.all_special_ids}
        self.special = {*(int(i) for i, token in added.items() if token.special), *tokenizer.all_special_ids}
        self._known: dict[str, Any] = {}

    # ---- asking the template ----

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, ask: bool = True) -> str:
        """The template's text of a conversation; `ask`: with the opening of the next answer. Raises Refusal."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=tools or None,
                    tokenize=False,
                    add_generation_prompt=ask,
                    **self.kwargs,
                )
            )
        except Exception as error:  # templates raise whatever Jinja or Python does
            raise Refusal(words(error)) from error

    def takes(self, *messages: Mapping[str, Any], tools: Any = None, shows: str = "") -> str:
        """Why the template does not take a conversation, or does not show the text `shows`; empty if all is well."""
        try:
            text = self.text(messages, tools)
        except Refusal as error:
            return str(error)
        return "" if shows in text else f"it leaves out {shows!r}"

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _once(self, name: str, ask: Any) -> Any:
        if name not in self._known:
            self._known[name] = ask()
        return self._known[name]

    @property
    def alternates(self) -> bool:
        """Whether it insists on user and assistant in turns."""
        return bool(self._once("users", lambda: self.own and self.takes(ASKED, ASKED) and not self.takes(ASKED)))

    @property
    def nine(self) -> bool:
        """Whether ids of tool calls must have nine letters or digits."""

        def ask() -> bool:
            def taken(name: str) -> bool:
                heard = {**HEARD, "tool_call_id": name}
                return any(not self.takes(ASKED, called(content, given, name), heard) for content, given in CALLED)

            return self.own and taken(ID) and not taken(LONG_ID)

        return bool(self._once("nine", ask))

    @property
    def opens_thinking(self) -> bool:
        """Whether the opening of an answer has opened its thinking."""

        def ask() -> bool:
            try:
                text = self.text([ASKED]) if self.own else ""
            except Refusal:
                return False
            return any(text.rfind(begin) > text.rfind(end) for begin, end in MARKS)

        return bool(self._once("thinking", ask))

    def _tail(self, *messages: Mapping[str, Any], tools: Any = None, ask: bool) -> list[int] | None:
        """Tokens of what follows the mark; None if it is not shown. Raises Refusal."""
        _, mark, tail = self.text(messages, tools, ask).partition(MARK)
        return self._ids(tail) if mark else None

    def _last(self) -> list[int]:
        """Tokens after an answer that is the last message."""

        def ask() -> list[int]:
            try:
                return self._tail(ASKED, ANSWERED, ask=False) or []
            except Refusal:
                return []

        return list(self._once("last", ask))

    def _end_of_call(self) -> tuple[list[int], int]:
        """Tokens after the arguments of a call, and which of them ends the turn (-1: none does)."""

        def ask() -> tuple[list[int], int]:
            for call in CALLED:
                try:
                    tail = self._tail(ASKED, called(*call), ask=False)
                except Refusal:
                    continue
                if tail is None:
                    continue
                ends = [at for at, token in enumerate(tail) if token in self.special]
                if not ends and (plain := [token for token in self._last() if token in self.special]):
                    tail, ends = [*tail, plain[0]], [len(tail)]  # as after an answer without calls
                return tail, max(ends, default=-1)
            return self._last(), next((at for at, token in enumerate(self._last()) if token in self.special), -1)

        return self._once("call", ask)

    # ---- what the loops use ----

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages in a form that the template takes; see the module's text."""
        joined: list[dict[str, Any]] = []
        for message in map(of_text, messages):
            before = joined[-1] if joined else {}
            role = message.get("role")
            same = role == before.get("role") and (role == "system" or (role == "user" and self.alternates))
            if same and isinstance(message.get("content"), str) and isinstance(before.get("content"), str):
                joined[-1] = {**before, "content": f"{before['content']}\n\n{message['content']}"}
            else:
                joined.append(message)
        if any(message.get("tool_calls") or message.get("tool_call_id") for message in joined) and self.nine:
            joined = [_with_nine(message) for message in joined]
        return joined

    def follow(
        self,
        previous: Sequence[Mapping[str, Any]],
        new: Sequence[Mapping[str, Any]],
        ids: Sequence[int],
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Tokens of the next prompt.

        Args:
            previous: the conversation up to the answer, which is the last of them.
            new: what follows it.
            ids: the prompt's tokens and the answer's.
            tools: schemas that the template shows.

        Returns:
            `ids` and what follows them.

        Raises:
            Refusal: the template can't take the new messages; its words.
        """
        ids = list(ids)
        try:
            if self.own and all(message.get("role") != "tool" for message in new):
                after = self._tail(ASKED, ANSWERED, *self.fit(new), tools=tools, ask=True)
                if after is not None:
                    return ids + self._missing(ids, after)
            if self.own:
                ids = ids + self._missing_call_end(ids)
            return merge_context(self.builder, list(previous), [*previous, *new], ids, tools=tools)
        except Exception as error:
            raise Refusal(words(error)) from error

    def _missing(self, ids: list[int], after: list[int]) -> list[int]:
        """What of `after`, the tokens that follow an answer, is not there yet."""
        end = next((at for at, token in enumerate(after) if token in self.special), -1)
        if end >= 0 and ids and (ids[-1] == after[end] or ids[-1] in self._ends()):
            return after[end + 1 :]
        for have in range(end, 0, -1):
            if ids[-have:] == after[:have]:
                return after[have:]
        return after

    def _ends(self) -> set[int]:
        """Tokens with which the template ends a turn, wherever that stands."""
        tail, end = self._end_of_call()
        return {token for token in [*self._last(), *tail[end:]] if token in self.special} if end >= 0 else set()

    def _missing_call_end(self, ids: list[int]) -> list[int]:
        tail, end = self._end_of_call()
        if end < 0 or not ids:
            return []
        if ids[-1] in self._ends():
            return tail[end + 1 :]
        for at in range(end):
            if tail[at] == ids[-1] and tail[at] in self.added:
                return tail[at + 1 :]
        return tail[end:]

    def said(self, ids: Sequence[int]) -> str:
        """The part of an answer that counts, as text: after its thinking; see `verl_ext.common.thinking`."""
        start, stop = self._spoken(ids, MARKS)
        text = self.tokenizer.decode(list(ids[start:stop]), skip_special_tokens=True)
        return said(text, self.opens_thinking and not start)

    def spoken(self, ids: Sequence[int]) -> list[int]:
        """The tokens of an answer after its thinking, for a tool parser. The channels of gpt-oss stay: calls are in
        one, and its parser reads them."""
        ids = list(ids)
        marks = [pair for pair in MARKS if not pair[0].startswith("<|channel|>")]
        start, stop = self._spoken(ids, marks)
        text = self.tokenizer.decode(ids[start:stop])
        kept = said(text, self.opens_thinking and not start, marks)
        # Marks that are no tokens of the vocabulary can be seen in the text only.
        return ids[start:stop] if kept == text else self._ids(kept)

    def _spoken(self, ids: Sequence[int], marks: Sequence[tuple[str, str]]) -> tuple[int, int]:
        """Where what counts begins and stops, by marks that are tokens of the vocabulary."""
        marked = [(begin, end) for begin, end, pair in self._marks() if pair in marks]
        ends = [at + len(end) for _, end in marked if (at := _find(ids, end, last=True)) >= 0]
        start = max(ends, default=0)
        opens = [at for begin, _ in marked if (at := _find(ids[start:], begin)) >= 0]
        return start, min((start + at for at in opens), default=len(ids))

    def _marks(self) -> list[tuple[list[int], list[int], tuple[str, str]]]:
        """Tokens of the marks of thinking that this vocabulary has as such."""

        def ask() -> list[tuple[list[int], list[int], tuple[str, str]]]:
            pairs = [(self._ids(begin), self._ids(end), (begin, end)) for begin, end in MARKS]
            return [pair for pair in pairs if self.added.intersection(pair[0]) and self.added.intersection(pair[1])]

        return list(self._once("marks", ask))


def of_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its content as one text. Raises Refusal: it has a block that is no text."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
        if kind != "text":
            raise Refusal(
                f"a message of the {message.get('role')} has a block of the type {kind!r}; the agent loops of verl_ext "
                "read text only. Use verl's own agent loops for images, videos and sound."
            )
    return {**message, "content": "".join(str(block.get("text") or "") for block in content)}


def _find(ids: Sequence[int], part: Sequence[int], last: bool = False) -> int:
    """Where `part` stands in `ids`, first or last; -1 if it does not."""
    places = range(len(ids) - len(part) + 1)
    for at in reversed(places) if last else places:
        if ids[at] == part[0] and list(ids[at : at + len(part)]) == list(part):
            return at
    return -1


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


def chat_of(tokenizer: Any, builder: Any) -> Chat:
    """The `Chat` of a tokenizer and builder, made once: a loop object lives for one trajectory only."""
    made = tokenizer.__dict__.setdefault("_verl_ext_chats", {})
    key = type(builder), repr(sorted(dict(builder.chat_template_kwargs).items())), repr(tokenizer.chat_template)
    if key not in made:
        made[key] = Chat(tokenizer, builder)
    return made[key]


def builder_of(tokenizer: Any, model_type: str | None, **more: Any) -> Any:
    """verl's token builder of a model; its plain one where that of the model's type wants tokens that are not there.

    So DeepSeek-R1-Distill-Qwen, of the type ``qwen2``, has no ``<|im_end|>``.
    """
    try:
        return create_continuous_token_builder(tokenizer, hf_model_type=model_type, **more)
    except ValueError as error:
        logger.warning("verl's token builder for model_type=%s is not for this tokenizer: %s", model_type, error)
        return create_continuous_token_builder(tokenizer, hf_model_type=None, **more)


class ChatLoop(AgentLoopBase):
    """An agent loop with its model's `Chat`.

    Attributes:
        chat: of ``self.tokenizer``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        except ValueError as error:
            if kwargs.get("hf_model_type") is None:
                raise
            kind = kwargs["hf_model_type"]
            logger.warning("verl's token builder for model_type=%s is not for this tokenizer: %s", kind, error)
            super().__init__(*args, **{**kwargs, "hf_model_type": None})
        self.chat = chat_of(self.tokenizer, self.continuous_token_builder)
