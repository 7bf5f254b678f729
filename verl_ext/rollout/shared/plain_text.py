# SPDX-License-Identifier: Apache-2.0
"""Texts that others wrote become tokens of text: a control token spelled out in one is split.

A chat template is rendered to a string and tokenised as a whole, so a text that spells ``<|im_end|>`` would end its own
turn and could begin another's: a solver forges the verifier, a web page the user, an environment a tool call. Every
agent loop here therefore passes what a model, a tool, a passage or an environment wrote through :class:`PlainText`
before it enters a message. ``<|im_end|>`` becomes ``< |im_end|>``: readable, and in every tokenizer only text. It works
on the strings, so it holds for every template and for all of verl's builders, and a text without control tokens is
not touched: its ids stay as they are.

Not touched either is what the run's author wrote: role prompts, examples, templates, and the messages of the data.
The texts that models are judged by stay as they were written, too; only prompts are split.

Control tokens are all special tokens of the tokenizer and those added tokens that look like a tag (``<tool_call>``,
``[INST]``), whether marked special or not. Chat templates that mark turns with words that are no tokens (Llama 2's
``[INST]``) cannot be guarded so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import re2

THINKING = frozenset({"<think>", "</think>"})
"""Chat templates read these in an assistant's own message, to leave out its reasoning: there they stay."""
NOT_TEXT = ("role", "type")
"""Fields of a message that templates compare and never show as anyone's words."""


def control_tokens(tokenizer: Any) -> list[str]:
    """The spellings that text may not be tokenised as, the longest first."""
    found = {str(token) for token in tokenizer.all_special_tokens}
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        text = str(getattr(token, "content", token))
        # Some tokenizers have added tokens that are words or runs of blanks.
        if getattr(token, "special", False) or (text[:1] in ("<", "[") and text[-1:] in (">", "]") and len(text) > 2):
            found.add(text)
    return sorted((text for text in found if text.strip()), key=lambda text: (-len(text), text))


def _broken(token: str) -> str:
    return f"{token[0]} {token[1:]}" if len(token) > 1 else ""


def _compared(key: Any, value: Any) -> bool:
    """Whether it is a word that templates compare. A tool's argument called ``type`` may be any text."""
    return key in NOT_TEXT and isinstance(value, str) and value.isidentifier()


class _Spellings:
    """The control tokens of one tokenizer as a pattern (RE2: linear in the text, which is hostile).

    Raises:
        ValueError: a split token would still be a control token.
    """

    def __init__(self, tokenizer: Any) -> None:
        tokens = control_tokens(tokenizer)
        options = re2.Options()
        options.max_mem = 256 << 20  # some tokenizers have thousands of reserved tokens
        self.pattern = re2.compile("|".join(re2.escape(token) for token in tokens) or r"[^\s\S]", options)
        normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        self.normalize = normalizer.normalize_str if normalizer is not None else None
        known = {tokenizer.convert_tokens_to_ids(token): token for token in tokens}
        known.pop(tokenizer.unk_token_id, None)
        for index in tokenizer.encode("\n".join(map(_broken, tokens)), add_special_tokens=False):
            if index in known:
                raise ValueError(
                    f"the tokenizer makes the control token {known[index]!r} of the text {_broken(known[index])!r}: "
                    "text of models and environments can't be told from control tokens with it"
                )


def _spellings(tokenizer: Any) -> _Spellings:
    """Made once a tokenizer: a loop object lives for one trajectory only."""
    made = getattr(tokenizer, "_verl_ext_spellings", None)
    if made is None:
        made = tokenizer._verl_ext_spellings = _Spellings(tokenizer)
    return made


class PlainText:
    """Splits control tokens in the texts of one trajectory, and counts them.

    Args:
        tokenizer: of the model that will read the texts.

    Attributes:
        split: control tokens that were split so far; the metric ``trajectory/control_tokens_split``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.spellings = _spellings(tokenizer)
        self.split = 0

    def text(self, text: str, keep: frozenset[str] = frozenset()) -> str:
        """The text with each control token split, but for those in `keep`.

        A lone surrogate, which no tokenizer takes, becomes a question mark.
        """
        text = self._split(text.encode("utf-8", "replace").decode("utf-8"), keep)
        if self.spellings.normalize is not None:
            # Tokens may be looked for in what the normaliser makes of a text (such as full-width signs: NFKC).
            seen = self.spellings.normalize(text)
            if any(match.group() not in keep for match in self.spellings.pattern.finditer(seen)):
                return self._split(seen, keep)
        return text

    def _split(self, text: str, keep: frozenset[str]) -> str:
        def put(match: Any) -> str:
            if match.group() in keep:
                return match.group()
            self.split += 1
            return _broken(match.group())

        while True:  # tokens may overlap; a round for each that a spelling has inside another
            before = self.split
            text = self.spellings.pattern.sub(put, text)
            if self.split == before:
                return text

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A chat message with the same done to all of its texts: content, tool calls and their arguments, names."""
        keep = THINKING if message.get("role") == "assistant" else frozenset()
        return {key: value if _compared(key, value) else self._value(value, keep) for key, value in message.items()}

    def _value(self, value: Any, keep: frozenset[str]) -> Any:
        if isinstance(value, str):
            return self.text(value, keep)
        if isinstance(value, Mapping):
            return {
                self._value(key, keep): each if _compared(key, each) else self._value(each, keep)
                for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._value(each, keep) for each in value]
        return value
