# SPDX-License-Identifier: Apache-2.0
"""How the action is read from a response of the step-wise loop.

What the model thinks (``<think>...</think>``) is not read, unless ``read_thinking``. After that, the
action is the text of the first ``<action>...</action>`` (``action_tag``), trimmed, runs of blanks
made one; neither they nor upper and lower case matter where the environment lists its actions. It is valid if the tags
are there (those of ``required_tags`` as well) and, where the environment lists its actions, it is one of them
(``check_admissible``). A turn whose action is not valid has ``is_action_valid=False``, for which HGPO, GiGPO and Dr.
MAS take a penalty off its return. What the environment gets then is ``invalid_action``: ``pass`` hands it the text
(without tags: the last 30 characters, as verl-agent does for text games), ``noop`` spends the step without it (as in
verl-agent's grid games): the observation stays, the reward is the observation's ``noop_reward`` (0, or what every step
costs there). In the history such a step is shown with the same text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import re2

from verl_ext.rollout.environments.options import EnvironmentOptions
from verl_ext.rollout.shared.tags import tagged

#: Characters at the end of an answer without tags that stand for its action.
TAIL = 30

_BLANKS = re.compile(r"\s+")
_ANY = re.compile(r"<[^<>]*>")


@functools.lru_cache(maxsize=4096)
def _pattern(action: str) -> Any:
    """An admissible action; a part in angle brackets stands for any text that is not empty.

    RE2 is linear in the text, however many such parts there are.
    """
    parts = [re2.escape(part) for part in _ANY.split(_one_blank(action))]
    return re2.compile("(?is)" + ".+?".join(parts))


def _one_blank(text: str) -> str:
    return _BLANKS.sub(" ", text.strip())


@dataclass(frozen=True)
class Action:
    """What an answer says to do.

    Attributes:
        text: the action, in the environment's own spelling if it is one of those it lists.
        valid: it could be read and is admissible.
    """

    text: str
    valid: bool


def parse_action(
    answer: str, admissible: Sequence[str] | None, options: EnvironmentOptions, said: str | None = None
) -> Action:
    """Read the action of an answer; the rules are in the module's text.

    Args:
        answer: the decoded response, without special tokens.
        admissible: the environment's list, or None.
        options: ``action_tag``, ``required_tags`` and ``check_admissible``.
        said: what of the answer comes after its thinking, where the action stands; None: all of it.
    """
    valid = all(tagged(answer, tag, any_case=True, most=1) for tag in options.required_tags)
    answer = answer if said is None else said
    if options.action_tag is None:
        text = answer
    else:
        found = tagged(answer, options.action_tag, any_case=True, most=1)
        valid = valid and bool(found)
        text = found[0] if found else answer[-TAIL:]
    text = _one_blank(text)
    if not text:
        return Action("", False)
    if admissible is not None and options.check_admissible:
        for action in admissible:
            if text.casefold() == _one_blank(action).casefold():
                return Action(action, valid)
        listed = any(_ANY.search(action) and _pattern(action).fullmatch(text) for action in admissible)
        return Action(text, valid and listed)
    return Action(text, valid)
