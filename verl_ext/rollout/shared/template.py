# SPDX-License-Identifier: Apache-2.0
"""From messages to tokens: the first prompt of a conversation, the next one, and what of an answer counts.

An agent loop has its model's `Chat` (:class:`ChatLoop`) and uses of it:

- :meth:`Chat.prompt`, a whole conversation as tokens, in a form that the template takes (`messages.fit`).
- :meth:`Chat.follow`, the next prompt of a conversation that goes on: the tokens so far, untouched, what is missing
  to the end of the turn (an answer that was cut has no end), and the new messages. What follows an answer is what the
  template itself writes after it in this conversation.
- :meth:`Chat.said`, an answer without its thinking.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from verl_ext.common.log_filter import Once
from verl_ext.common.thinking import MARKS, said
from verl_ext.integration.compat.verl_api import merge_context
from verl_ext.rollout.shared.messages import fit
from verl_ext.rollout.shared.probes import ANSWERED, ASKED, MARK, Probes, Refusal, called, words

logger = logging.getLogger(__name__)
logger.addFilter(Once())


TOOLS_REMEDY = (
    "Give actor_rollout_ref.model.custom_chat_template one that shows them, or have the prompts describe them and set "
    "tools_in_prompt=true beside the tools."
)


class Chat(Probes):
    """The chat template of one model.

    Args:
        tokenizer: with the template.
        builder: verl's token builder of the model.
    """

    def __init__(self, tokenizer: Any, builder: Any) -> None:
        super().__init__(tokenizer, dict(builder.chat_template_kwargs))  # data.apply_chat_template_kwargs
        self.builder = builder
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.added = {*map(int, added), *tokenizer.all_special_ids}
        self.special = {*(int(i) for i, token in added.items() if token.special), *tokenizer.all_special_ids}
        self._known: dict[str, Any] = {}

    @functools.cached_property
    def size(self) -> int:
        """Tokens of the vocabulary, counted once: it takes a tenth of a second where they are many."""
        return len(self.tokenizer)

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages in a form that the template takes. Raises Refusal: one can't be."""
        return fit(self, messages)

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Tokens of a conversation with the opening of the next answer.

        Raises:
            Refusal: the template can't take it; its words.
        """
        try:
            given = self.fit(messages)
            if not self.own or self.builder.supports_multimodal():
                return list(self.builder.build_initial_tokens(given, tools=tools))
            self._need_schemas(tools)
            return self._ids(self.text(given, tools))
        except Exception as error:
            raise Refusal(words(error)) from error

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
            if not self.own:
                return merge_context(self.builder, list(previous), [*previous, *new], ids, tools=tools)
            refused: Refusal | None = None
            contexts: list[list[Mapping[str, Any]]] = [list(previous[:-1]), [ASKED]]
            for before in contexts:  # what it refuses of the past can't be asked of the new
                try:
                    after = self._after(before, previous[-1], new, tools)
                except Refusal as error:
                    refused = refused or error
                else:
                    return ids + self._missing(ids, *after)
            assert refused is not None
            raise refused
        except Exception as error:
            raise Refusal(words(error)) from error

    def _need_schemas(self, tools: Any) -> None:
        if tools and self.schemas:
            raise Refusal(f"the chat template does not show the model its tools: {self.schemas}. {TOOLS_REMEDY}")

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _tail_ids(self, tail: str) -> list[int]:
        """Tokens of a text that follows another; some tokenizers put a blank before the first word of a text."""
        mark, both = self._ids(MARK), self._ids(MARK + tail)
        return both[len(mark) :] if both[: len(mark)] == mark else self._ids(tail)

    def _after(
        self,
        before: list[Mapping[str, Any]],
        answer: Mapping[str, Any],
        new: Sequence[Mapping[str, Any]],
        tools: Any,
    ) -> tuple[list[int], int, bool]:
        """What :meth:`_missing` needs of what the template writes after an answer. Raises Refusal."""
        mark = MARK
        while mark in repr((before, answer, new)):
            mark += "x"
        if self.late_system != "place":  # at the front, where the tokens are, it can't be put any more
            systems = ("system", "developer")
            new = [{**message, "role": "user"} if message.get("role") in systems else message for message in new]
        answers = [message for message in new if message.get("role") == "tool"]
        calls = list(answer.get("tool_calls") or [])
        if not answers or not calls or self.calls is None:
            marked = self.fit([*before, {"role": "assistant", "content": mark}])
            text = self.text(self.fit([*marked, *new]), tools)
            return *self._parted(text, self.text(marked, tools, ask=False), mark), False
        form = self.calls

        def asked(chosen: list[Any]) -> dict[str, Any]:
            marked = [{**one, "function": {**one["function"], "arguments": {}}} for one in chosen[:-1]]
            marked.append({**chosen[-1], "function": {**chosen[-1]["function"], "arguments": {"answer": mark}}})
            return {"role": "assistant", "content": form.content, "tool_calls": marked}

        if self.parallel or len(answers) == 1:
            chosen = calls if self.parallel else calls[-1:]
            marked = self.fit([*before, asked(chosen)])
            text = self.text(self.fit([*before, asked(chosen), *new]), tools)
            return *self._parted(text, self.text(marked, tools, ask=False), mark), True
        # One call a message: what each tool says is written after its own call.
        text, alone = "", ""
        rest = [message for message in new if message.get("role") != "tool"]
        named = {call.get("id"): call for call in calls}
        for place, one in enumerate(answers):
            call = named.get(one.get("tool_call_id")) or calls[min(place, len(calls) - 1)]
            last = place == len(answers) - 1
            said_by = self.text(self.fit([*before, asked([call]), one, *(rest if last else [])]), tools, ask=last)
            called_by = self.text(self.fit([*before, asked([call])]), tools, ask=False)
            if not place:
                text, alone = said_by, called_by
            elif said_by.startswith(called_by):
                text += said_by[len(called_by) :]
            else:
                raise Refusal("the chat template takes one call of a tool at a time, and there are several")
        return *self._parted(text, alone, mark), True

    def _parted(self, text: str, alone: str, mark: str) -> tuple[list[int], int]:
        """Tokens after the mark in `text`, and how many of them close its turn, as they do where nothing follows it."""
        _, found, tail = text.rpartition(mark)
        if not found:
            raise Refusal("the chat template leaves out the answer")
        after, last = self._tail_ids(tail), self._tail_ids(alone.rpartition(mark)[2])
        same = next(
            (at for at, (x, y) in enumerate(zip(after, last, strict=False)) if x != y), min(len(after), len(last))
        )
        if last and not self.special.intersection(after[:same]):  # the last answer of all ends otherwise in gpt-oss
            same = next((at + 1 for at, token in enumerate(after) if token in self.special), same)
        return after, same

    def _missing(self, ids: list[int], after: list[int], closing: int, calling: bool) -> list[int]:
        """What of `after`, the tokens that follow an answer, is not there yet.

        `closing` of them close its turn; `calling`: they begin with the end of a call's arguments.
        """
        for have in range(min(max(closing, 1), len(ids)), 0, -1):
            if ids[-have:] == after[:have] and (closing or after[0] in self.special):
                return after[have:]
        ends = [at for at, token in enumerate(after) if token in self.special]
        if not ends or not ids:
            return after
        stop = max((at for at in ends if at < closing), default=ends[0])
        blank = not self.tokenizer.decode(ids[-1:]).strip()  # Gemma's vocabulary has added lines, which end no turn
        for at in range(max(stop, closing - 1), -1, -1):
            if after[at] == ids[-1] and after[at] in self.added and not blank:
                return after[at + 1 :]
        if ids[-1] in self._ends():
            return after[stop + 1 :]
        opens = next((at for at in ends if at >= closing), None)
        if opens is not None and after[opens] == ids[-1] and not self._ends():
            return after[opens + 1 :]  # where nothing ends a turn the model stops at what opens the next one (GLM)
        return after[stop:] if calling else after

    def _ends(self) -> set[int]:
        """Tokens with which the template ends a last answer, or one that calls a tool."""
        if "ends" not in self._known:
            found: set[int] = set()
            for answer in [ANSWERED] + ([] if self.calls is None else [called(self.calls, {"word": MARK})]):
                try:
                    tail = self._tail_ids(self.text([ASKED, answer], ask=False).rpartition(MARK)[2])
                except Refusal:
                    continue
                while tail and not self.tokenizer.decode(tail[-1:]).strip():
                    tail = tail[:-1]
                found.update(token for token in tail[-1:] if token in self.special)
            self._known["ends"] = found
        return set(self._known["ends"])

    def unclosed(self, ids: Sequence[int]) -> list[int]:
        """An answer without what closes its turn, which is not text though a tokenizer may not call it special."""
        ids = list(ids)
        while ids and (ids[-1] in self.special or ids[-1] in self._closers()):
            ids.pop()
        return ids

    def _closers(self) -> set[int]:
        """Added tokens that the template writes after a last answer."""
        if "closers" not in self._known:
            try:
                tail = self._tail_ids(self.text([ASKED, ANSWERED], ask=False).rpartition(MARK)[2]) if self.own else []
            except Refusal:
                tail = []
            self._known["closers"] = self.added.intersection(tail)
        return set(self._known["closers"])

    def said(self, ids: Sequence[int]) -> str:
        """The part of an answer that counts, as text: after its thinking; see `verl_ext.common.thinking`."""
        ids = self.unclosed(ids)
        start, stop = self._spoken(ids, MARKS)
        text = self.tokenizer.decode(ids[start:stop], skip_special_tokens=True)
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

        if "marks" not in self._known:
            pairs = [(self._ids(begin), self._ids(end), (begin, end)) for begin, end in MARKS]
            known = [pair for pair in pairs if self.added.intersection(pair[0]) and self.added.intersection(pair[1])]
            self._known["marks"] = known
        return list(self._known["marks"])


def _find(ids: Sequence[int], part: Sequence[int], last: bool = False) -> int:
    """Where `part` stands in `ids`, first or last; -1 if it does not."""
    places = range(len(ids) - len(part) + 1)
    for at in reversed(places) if last else places:
        if ids[at] == part[0] and list(ids[at : at + len(part)]) == list(part):
            return at
    return -1


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
