# SPDX-License-Identifier: Apache-2.0
"""What a chat template takes, asked of it by rendering short conversations: nothing here knows a family by name.

A template may refuse a message (its own words are in :class:`Refusal`), and it may leave one out without a word. Both
are found by words that no template says of itself: what was given and is not in the text was left out.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError

from verl_ext.common.thinking import MARKS

#: Stands for an answer in a conversation that is rendered to see what the template writes around one.
MARK = "theanswerstandshere"
RULES, QUESTION, HEARD = "therulesstandhere", "thequestionstandshere", "thetoolsays"
SYSTEM = {"role": "system", "content": RULES}
ASKED = {"role": "user", "content": QUESTION}
ANSWERED = {"role": "assistant", "content": MARK}
NAME = "lookup_a_word"
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "looks up a word",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "a word"}},
            "required": ["word"],
        },
    },
}
ID, OTHER_ID, LONG_ID = "call00000", "call00001", "call_0123456789abcdef01234567"


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


@dataclass(frozen=True)
class CallForm:
    """How a template wants a message that calls tools.

    Attributes:
        content: of a message without words beside the call: empty text or None.
        as_json: the arguments are JSON, not an object.
        any_text: arguments that are no object are taken too.
    """

    content: str | None
    as_json: bool
    any_text: bool = True

    def arguments(self, given: Any) -> Any:
        """The arguments of a call in this form, given as an object or as JSON."""
        if self.as_json:
            return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        if isinstance(given, str):
            try:
                made = json.loads(given)
            except (ValueError, RecursionError):
                made = None
            if isinstance(made, dict):
                return made
        if isinstance(given, Mapping) or self.any_text:
            return given
        return {"arguments": given}


#: In the order in which they are tried.
FORMS = (CallForm("", False), CallForm(None, False), CallForm(None, True), CallForm("", True))


def called(form: CallForm, arguments: Any, *names: str, content: str = "") -> dict[str, Any]:
    """A message that calls `TOOL`, once for each of the ids `names`."""
    function = {"name": NAME, "arguments": form.arguments(arguments)}
    calls = [{"type": "function", "id": name, "function": function} for name in names or (ID,)]
    return {"role": "assistant", "content": content or form.content, "tool_calls": calls}


def heard(name: str = ID, content: str = HEARD) -> dict[str, Any]:
    """What the tool answered to the call `name`."""
    return {"role": "tool", "content": content, "name": NAME, "tool_call_id": name}


class Probes:
    """A chat template and what is known of it. Everything is asked once.

    Args:
        tokenizer: with the template.
        kwargs: of the template (``data.apply_chat_template_kwargs``).

    Attributes:
        own: whether there is a template; without one (DeepSeek-V4) verl's token builder does everything.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.kwargs = {k: v for k, v in kwargs.items() if k not in ("tokenize", "return_dict", "return_tensors")}
        self.own = bool(getattr(tokenizer, "chat_template", None))

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

    def takes(self, *messages: Mapping[str, Any], tools: Any = None, shows: Sequence[str] = ()) -> str:
        """Why the template does not take a conversation, or does not show the texts `shows`; empty if all is well."""
        try:
            text = self.text(messages, tools)
        except Refusal as error:
            return str(error)
        missing = [one for one in shows if one not in text]
        return f"it leaves out {missing[0]!r}" if missing else ""

    def _shows(self, *messages: Mapping[str, Any], shows: Sequence[str]) -> bool:
        return self.own and not self.takes(*messages, shows=shows)

    # ---- system messages, roles ----

    @functools.cached_property
    def system(self) -> bool:
        """Whether it shows a system message before the user's."""
        return self._shows(SYSTEM, ASKED, shows=(RULES, QUESTION))

    @functools.cached_property
    def late_system(self) -> str:
        """Where a system message later in a conversation is shown: ``place`` (where it stands), ``front``, or not."""
        late = {"role": "system", "content": "thelaterrules"}
        before = [SYSTEM, ASKED] if self.system else [ASKED]
        try:
            text = self.text([*before, ANSWERED, late, ASKED])
            alone = self.text([ASKED, ANSWERED, late])
        except Refusal:
            return ""
        if any(one["content"] not in text for one in (*before, ANSWERED, late)) or late["content"] not in alone:
            return ""
        return "place" if text.index(late["content"]) > text.index(MARK) else "front"

    @functools.cached_property
    def developer(self) -> bool:
        """Whether it knows messages of the role ``developer``, otherwise than those of the system. Templates that write
        the name of any role do not."""

        def shown(role: str) -> str:
            try:
                text = self.text([{**SYSTEM, "role": role}, ASKED])
            except Refusal:
                return ""
            return text if RULES in text and QUESTION in text else ""

        text = shown("developer")
        any_role = shown("bystander").replace("bystander", "developer")
        return bool(text) and text not in (shown("system"), any_role)

    def shows_role(self, role: str) -> str:
        """Why it does not show a message of some other role; empty if it does."""
        found: dict[str, str] = self.__dict__.setdefault("_roles", {})
        if role not in found:
            found[role] = self.takes(ASKED, ANSWERED, {"role": role, "content": HEARD}, shows=(HEARD,))
        return found[role]

    @functools.cached_property
    def alternates(self) -> bool:
        """Whether it insists on user and assistant in turns."""
        return self.own and bool(self.takes(ASKED, ASKED)) and not self.takes(ASKED)

    # ---- tools ----

    @functools.cached_property
    def schemas(self) -> str:
        """Why it does not show which tools there are; empty if it does."""
        return self.takes(ASKED, tools=[TOOL], shows=(NAME, QUESTION))

    @functools.cached_property
    def calls(self) -> CallForm | None:
        """How it wants calls of tools; None: it does not show them."""
        quoted = json.dumps(json.dumps({"word": MARK}))[1:-1]  # arguments that were JSON already, made JSON once more
        for form in FORMS:
            try:
                text = self.text([ASKED, called(form, {"word": MARK}), heard()])
            except Refusal:
                try:
                    text = self.text([ASKED, called(form, {"word": MARK})])
                except Refusal:
                    continue
            if MARK in text and quoted not in text and "None" not in text.replace(QUESTION, ""):
                any_text = form.as_json or not self.takes(ASKED, called(form, "no JSON"))
                return CallForm(form.content, form.as_json, any_text)
        return None

    @functools.cached_property
    def tools(self) -> str:
        """Why it does not show what tools answer; empty if it does."""
        message = ANSWERED if self.calls is None else called(self.calls, {"word": MARK})
        return self.takes(ASKED, message, heard(), shows=(HEARD,))

    @functools.cached_property
    def parallel(self) -> bool:
        """Whether it shows several calls in one message."""
        if self.calls is None:
            return False
        message = called(self.calls, {"word": MARK}, ID, OTHER_ID)
        try:
            text = self.text([ASKED, message, heard(), heard(OTHER_ID)])
        except Refusal:
            return False
        return text.count(MARK) == 2

    @functools.cached_property
    def beside(self) -> bool:
        """Whether it shows what an answer says beside a call."""
        if self.calls is None:
            return False
        message = called(self.calls, {"word": MARK}, content="wordsbeside")
        return self._shows(ASKED, message, heard(), shows=("wordsbeside", MARK)) or self._shows(
            ASKED, message, shows=("wordsbeside", MARK)
        )

    @functools.cached_property
    def calls_beside(self) -> bool:
        """Whether it shows a call that stands beside words."""
        return self.calls is not None and self._shows(
            ASKED, called(self.calls, {"word": MARK}, content="wordsbeside"), heard(), shows=(MARK,)
        )

    @functools.cached_property
    def nine(self) -> bool:
        """Whether ids of tool calls must have nine letters or digits."""

        def taken(name: str) -> bool:
            return any(not self.takes(ASKED, called(form, {"word": MARK}, name), heard(name)) for form in FORMS)

        return self.own and taken(ID) and not taken(LONG_ID)

    # ---- answers ----

    @functools.cached_property
    def opens_thinking(self) -> bool:
        """Whether the opening of an answer has opened its thinking."""
        try:
            text = self.text([ASKED]) if self.own else ""
        except Refusal:
            return False
        return any(text.rfind(begin) > text.rfind(end) for begin, end in MARKS)

    @functools.cached_property
    def unopened(self) -> str:
        """What a conversation that asks for an answer lacks before one; empty if it opens the answer."""
        try:
            asked, plain = self.text([ASKED]), self.text([ASKED], ask=False)
            whole = self.text([ASKED, ANSWERED])
        except Refusal:
            return ""
        asked, opening = asked.rpartition(QUESTION)[2], whole.partition(MARK)[0].rpartition(QUESTION)[2]
        if asked != plain.rpartition(QUESTION)[2] or not opening.startswith(asked):
            return ""
        return opening[len(asked) :].strip()
