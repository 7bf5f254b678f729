# SPDX-License-Identifier: Apache-2.0
"""What an answer says, apart from its thinking: models that reason write ``<think>...</think>`` before they answer."""

from __future__ import annotations

from collections.abc import Sequence

#: How thinking opens and closes, in the text of an answer. The last two are the channels of gpt-oss and of Gemma 4.
MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("<|channel>thought", "<channel|>"),
)


def said(text: str, opened: bool = False, marks: Sequence[tuple[str, str]] = MARKS) -> str:
    """The part of an answer that counts: what comes after its thinking.

    That is the text after the last mark that closes thinking. Thinking that never closes, because the answer was cut,
    says nothing: the text ends where it opens. A text without any mark is returned as it is. Takes linear time.

    Args:
        text: of an answer.
        opened: the prompt has opened the thinking already (as DeepSeek-R1's chat template does), so that a text without
            a closing mark is thinking from its beginning.
        marks: how thinking opens and closes.
    """
    ends = [at + len(close) for _, close in marks if (at := text.rfind(close)) >= 0]
    if not ends and opened:
        return ""
    rest = text[max(ends, default=0) :]
    return rest[: min((at for open_, _ in marks if (at := rest.find(open_)) >= 0), default=len(rest))]
