# SPDX-License-Identifier: Apache-2.0
"""Question answering: exact match and token F1 of short answers, as in SQuAD (arXiv 1606.05250) and Search-R1.

Texts are compared in lower case, without punctuation and the articles a, an and the, with single blanks. Of several
accepted answers the best counts. An answer of articles or punctuation alone keeps them: "A" is none but "a".
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any, Literal

import re2

from verl_ext.common.thinking import said
from verl_ext.rewards.arguments import references, refuse_unknown

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ANSWER = re2.compile(r"(?is)<answer>(.*?)</answer>")  # linear, also in openings without an end


def normalize(text: str) -> str:
    """Lower case, no punctuation, no articles, single blanks; articles or punctuation that are all there is stay."""
    lower = text.lower()
    words = lower.translate(_PUNCTUATION)
    return next((" ".join(one.split()) for one in (_ARTICLES.sub(" ", words), words, lower) if one.strip()), "")


def exact_match(answer: str, accepted: list[str]) -> float:
    """1.0 if the normalised answer equals one of the accepted ones."""
    return float(any(normalize(answer) == normalize(one) for one in accepted))


def f1(answer: str, accepted: list[str]) -> float:
    """Best harmonic mean of precision and recall over the words of the normalised texts, in [0, 1].

    Two empty texts are equal (1.0); yes, no and noanswer match only themselves.
    """
    return max(_f1(normalize(answer).split(), normalize(one).split()) for one in accepted)


def _f1(answer: list[str], reference: list[str]) -> float:
    closed = ({"yes"}, {"no"}, {"noanswer"})
    if not answer or not reference or set(answer) in closed or set(reference) in closed:
        return float(answer == reference)
    common = sum((Counter(answer) & Counter(reference)).values())
    return 2 * common / (len(answer) + len(reference))


def extract(text: str) -> str | None:
    """The last ``<answer>...</answer>`` of a text, stripped; None without one."""
    found = _ANSWER.findall(text.encode(errors="replace").decode())  # re2 cannot read lone surrogates
    return found[-1].strip() if found else None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    metric: Literal["em", "f1"] = "em",
    require_tags: bool = False,
    read_thinking: bool = False,
    **kwargs: Any,
) -> dict[str, float]:
    """Judge a short answer.

    Args:
        data_source: of the row; not used.
        solution_str: the answer, or a text with ``<answer>...</answer>``, of which the last counts.
        ground_truth: accepted answers: text, list, or ``{"target": ...}``.
        extra_info: of the row; not used.
        metric: which number is the score, ``em`` or ``f1``.
        require_tags: a text without tags scores 0 instead of being the answer itself.
        read_thinking: what the model thinks (``<think>...</think>``) is read too; otherwise only what comes after it.
        **kwargs: what verl adds in runs with a reward model.

    Returns:
        ``score``, ``acc`` (exact match), ``f1`` and ``answered`` (there was an answer to judge), each in [0, 1].

    Raises:
        TypeError: unknown option.
        ValueError: bad `metric`, or no accepted answer.
    """
    refuse_unknown(kwargs, ("metric", "require_tags", "read_thinking"))
    if metric not in ("em", "f1"):
        raise ValueError(f"reward_kwargs.metric is {metric!r}; choose em or f1")
    accepted = references(ground_truth)
    text = solution_str if read_thinking else said(solution_str)
    answer = extract(text)
    if answer is None and not require_tags:
        answer = text.strip()
    if not answer:
        return {"score": 0.0, "acc": 0.0, "f1": 0.0, "answered": 0.0}
    matched, overlap = exact_match(answer, accepted), f1(answer, accepted)
    return {"score": matched if metric == "em" else overlap, "acc": matched, "f1": overlap, "answered": 1.0}
