# SPDX-License-Identifier: Apache-2.0
"""Two steps of verl's real trainer with a Qwen2 and a Gemma, their own tokenizers and their chat templates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import real_models
from harness import Lab

from verl_ext.lab.transcripts.read import Choice, read

pytestmark = pytest.mark.e2e

LIMIT, TURNS = 5, 3
#: The end of an answer, the feedback and the opening of the next answer, as each template writes them.
ENDS = {"qwen2": "<|im_end|>", "gemma": "<end_of_turn>"}
NEXT = {
    "qwen2": "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "gemma": "<end_of_turn>\n<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
}
FIRST = {
    "qwen2": "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
    "gemma": "<bos><start_of_turn>user\n{system}{question}<end_of_turn>\n<start_of_turn>model\n",
}
SYSTEM = {"qwen2": real_models.RULES, "gemma": f"{real_models.RULES}\n\n"}
NO_SYSTEM = {"qwen2": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", "gemma": ""}


@pytest.mark.parametrize("name", ENDS)
def test_answers_that_are_cut_end_their_turn_as_the_template_does(
    name: str, standing_lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every prompt of a run is the template's own: of whole answers, of cut ones and of empty ones. Gemma's template
    takes no system message and no two messages of a user; no trajectory ends for that."""
    folder = tmp_path_factory.mktemp(name)
    model = real_models.make(name, folder / "model")
    run = (
        replace(standing_lab, model=model, data=real_models.write_rows(folder))
        .run(
            f"real_{name}",
            overrides=[
                f"+actor_rollout_ref.rollout.custom.multi_turn.max_turns={TURNS}",
                "data.max_prompt_length=256",
                f"data.max_response_length={LIMIT}",
                "actor_rollout_ref.rollout.n=2",
                # A token of these vocabularies is a megabyte of logits.
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
                f"verl_ext.rollouts_dir={standing_lab.root / f'real_{name}' / 'rollouts'}",
            ],
        )
        .check()
    )
    assert "no trial conversation" not in run.log
    kinds: list[str] = []
    for step in (1, 2):
        metrics, records = run.metrics[step], read(run.folder, Choice(steps=(step, step)))
        assert metrics["rollout/trajectories"] == len(records) == 8
        assert not any(value for key, value in metrics.items() if key.startswith("rollout/failures/"))
        assert metrics["rollout/turns"] == sum(len(record["turns"]) for record in records) == len(run.rows(step))
        assert metrics["rollout/sequences"] == 8  # all turns of a trajectory continue each other
        assert metrics["actor/grad_norm"] > 0
        for record in records:
            kinds += by_the_template(name, record)
    seen = {kind: kinds.count(kind) for kind in ("whole", "cut", "empty")}
    assert all(seen.values()), seen


def by_the_template(name: str, record: dict[str, Any]) -> list[str]:
    """Hold each prompt of a trajectory to what the template writes; what kind of answer was before each later one."""
    turns, ends, kinds = record["turns"], ENDS[name], []
    last = turns[-1]["response"].removesuffix(ends).strip()
    solved = last.isdigit() and int(last) == 7
    assert len(turns) == TURNS or solved
    assert record["stop_reason"] == ("solved" if solved else "max_turns") and not record["failure"]
    first = turns[0]["prompt"]
    (question,) = [text for a, b in real_models.SUMS if (text := f"What is {a} plus {b}?") in first]
    system = (SYSTEM if real_models.RULES in first else NO_SYSTEM)[name]
    assert first == FIRST[name].format(system=system, question=question)
    for turn, later in zip(turns, turns[1:], strict=False):
        said = turn["response"].removesuffix(ends)
        cut = said == turn["response"]
        assert not cut or turn["response_tokens"] == LIMIT
        kinds.append("cut" if cut else "whole" if said else "empty")
        following = NEXT[name].format(later["observation"].partition("\n")[2])
        assert later["prompt"] == turn["prompt"] + turn["response"] + following.removeprefix("" if cut else ends)
    return kinds
