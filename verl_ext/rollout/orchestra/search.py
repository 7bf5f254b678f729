# SPDX-License-Identifier: Apache-2.0
"""``search``: a verifier asks whether enough is known; if not, a searcher queries the retriever; if so, an answerer
answers.

The three agents of Dr. MAS's search team (arXiv 2602.08847; top 3 passages, at most 4 steps). A step is a verdict and
what follows from it. In the last step the answerer is called without a verdict, so every trajectory that reaches it
has an answer (our rule). The retriever is the one of ``verl_ext.orchestra.retriever``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from verl_ext.methods.options import AtLeastOne
from verl_ext.rewards.arguments import references
from verl_ext.rewards.qa import normalize
from verl_ext.rollout.orchestra.agents import OrchestraFailure
from verl_ext.rollout.orchestra.core import BoundAgent, Outcome, Task
from verl_ext.rollout.orchestra.registry import agent, orchestra
from verl_ext.rollout.passages import Passage, as_text
from verl_ext.rollout.shared.tags import tagged


def _tagged(tag: str, text: str) -> str | None:
    """The last ``<tag>...</tag>`` of a text, stripped; None if there is none or it is empty."""
    found = tagged(text, tag)
    return (found[-1].strip() or None) if found else None


@agent
def verifier(text: str) -> bool | None:
    """You decide whether a team knows enough to answer a question. Read the question and the passages found so far.
    End with <verify>yes</verify> if they are enough, or <verify>no</verify> if the team should search."""
    return {"yes": True, "no": False}.get((_tagged("verify", text) or "").lower())


@agent
def searcher(text: str) -> str | None:
    """You search for a team that has to answer a question. Read the question and the passages found so far, then write
    one query for what is missing: <search>your query</search>."""
    return _tagged("search", text)


@agent
def answerer(text: str) -> str | None:
    """You answer a question for a team that has searched for passages. Use them where they help, and give the answer
    itself, as short as possible: <answer>your answer</answer>."""
    return _tagged("answer", text)


def context(question: str, known: Sequence[str]) -> str:
    """What every agent of the team is told: the question, and what the searches gave (see `finding`)."""
    return f"Question: {question}\n\n" + ("\n\n".join(known) or "Nothing has been searched yet.")


def finding(query: str, passages: Sequence[Passage], failed: bool = False) -> str:
    """A query and its passages as the agents read them."""
    text = as_text(passages) or ("The search failed." if failed else "Nothing was found.")
    return f"<search>{query}</search>\n<information>\n{text}\n</information>"


def holds_answer(passages: Sequence[Passage], ground_truth: Any) -> bool:
    """Whether a passage has the words of an accepted answer, one after the other; texts as `normalize` makes them.

    False if there is no ground truth of that kind (see `verl_ext.rewards.qa.compute_score`).
    """
    try:
        accepted = [normalize(one) for one in references(ground_truth)]
    except (TypeError, ValueError):
        return False
    texts = [f" {normalize(f'{passage.title} {passage.text}')} " for passage in passages]
    return any(answer and f" {answer} " in text for answer in accepted for text in texts)


@orchestra("search")
async def search(
    task: Task,
    verifier: BoundAgent,
    searcher: BoundAgent,
    answerer: BoundAgent,
    *,
    max_steps: AtLeastOne = 4,
    top_k: AtLeastOne = 3,
    unparsable_verdict: Literal["no", "yes"] = "no",
    on_retriever_failure: Literal["continue", "end"] = "continue",
) -> Outcome:
    """Verify, search or answer. The run's reward function judges the answer; one that can't be read earns 0 at most.

    Numbers of a trajectory: ``searches`` (readable queries), ``searches_found`` (those that found a passage),
    ``searched_first`` (the first step was a readable query), ``answer_retrieved`` (a passage held an accepted answer),
    ``answered`` (the answer could be read). Exact match among the trajectories with ``answer_retrieved`` tells reading
    from searching.

    Options:
        max_steps: steps at most, the answering one included.
        top_k: passages of one query.
        unparsable_verdict: what a verdict that can't be read counts as (Dr. MAS, released: yes).
        on_retriever_failure: ``continue``: the agents read that the search failed and go on; ``end``: the trajectory
            fails with the retriever's reason.
    """
    known: list[str] = []
    searches = found = 0
    searched_first = retrieved = False
    for step in range(max_steps):
        told = context(task.question, known)
        enough = step == max_steps - 1
        if not enough:
            verdict = await verifier(told)
            enough = verdict.value if verdict.valid else unparsable_verdict == "yes"
        if enough:
            answer = await answerer(told)
            info = {
                "searches": searches,
                "searches_found": found,
                "searched_first": float(searched_first),
                "answer_retrieved": float(retrieved),
                "answered": float(answer.valid),
            }
            # Where a wrong answer earns less than 0, so does one that can't be read.
            reward = None if answer.valid else min(0.0, await task.score(answer.text))
            return Outcome(reward=reward, answer=answer.value, info=info)
        query = await searcher(told)
        if not query.valid:
            known.append("<information>The last query could not be read.</information>")
            continue
        searches += 1
        searched_first = searched_first or step == 0
        result = await task.search(query.value, top_k)
        if result.failure and on_retriever_failure == "end":
            raise OrchestraFailure(result.failure, result.detail)
        found += bool(result.passages)
        retrieved = retrieved or holds_answer(result.passages, task.ground_truth)
        known.append(finding(query.value, result.passages, bool(result.failure)))
    raise AssertionError("the last step answers")
