# SPDX-License-Identifier: Apache-2.0
"""The agent loop with a real tokenizer, pool and judge, the model's answers scripted: contexts, and lost verdicts."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.workers.rollout.replica import TokenOutput

from verl_ext.cli import main
from verl_ext.integration.parts.advantage.rollouts import rollout_metrics
from verl_ext.lab.demo.model import train_tokenizer
from verl_ext.lab.kernels.stts import read
from verl_ext.methods.trloo import trloo_advantage
from verl_ext.rollout.kernels.loop import AGENT_NAME
from verl_ext.rollout.shared.worker import validating

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rollout"))
from loops import make_loop  # noqa: E402

CHAIN = "mul add relu"
FUSED, WRONG, NONE = f"krve {CHAIN}", "krve add mul relu", "nothing"
OPTIONS = {"pairs": 3, "max_pairs": 3, "looks": 10, "workers": 1}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([CHAIN] * 64)


class Engine:
    """Gives the answers in turn, and keeps the prompts."""

    def __init__(self, tokenizer: Any, answers: list[str]) -> None:
        self.tokenizer, self.answers = tokenizer, answers
        self.prompts: list[str] = []

    async def generate(self, *, prompt_ids: list[int], **_: Any) -> Any:
        answer = self.answers[len(self.prompts)]
        self.prompts.append(self.tokenizer.decode(prompt_ids))
        ids = self.tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), extra_fields={})


def play(
    tokenizer: Any, answers: list[str], validate: bool = False, cage: str = "required", **options: Any
) -> tuple[list[AgentLoopOutput], list[str]]:
    """One trajectory, in a task of its own as verl plays it."""
    node = {"kernels": {**OPTIONS, **options}, "sandbox": {"cage": cage}}
    rollout = {"prompt_length": 2000, "response_length": 100}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}, "verl_ext": node})
    engine = Engine(tokenizer, answers)
    row = {"raw_prompt": [{"role": "user", "content": CHAIN}], "extra_info": {"task": CHAIN, "index": 0}}

    async def run() -> Any:
        validating.set(validate)
        return await make_loop(AGENT_NAME, config, engine, tokenizer).run({"temperature": 1.0}, **row)

    return asyncio.run(run()), engine.prompts


@pytest.mark.slow
@pytest.mark.parametrize(("select", "kept"), [("paper", (0, 2)), ("released_best", (0, 1)), ("last", (2, 3))])
def test_a_later_prompt_holds_the_task_and_the_kept_turns(
    cluster: None, tokenizer: Any, select: str, kept: tuple[int, ...]
) -> None:
    """The first two turns as in training, then the kept ones: being right alone is paid, 1, 0, 1, 0."""
    half = f"krve mul;krve {CHAIN[4:]}"
    answers = [FUSED, WRONG, half, NONE, FUSED]
    stts = {"turns": 2, "iterations": 4, "window": 2, "select": select}
    only_right = {"speedup_weight": 0.0, "coverage_weight": 0.0}
    rows, prompts = play(tokenizer, answers, validate=True, stts=stts, reward=only_right, looks=100)
    assert len(rows) == 5 and rows[0].reward_score == max(row.extra_fields["turn_reward"] for row in rows)
    said = [row.extra_fields["kernel_status"] for row in rows]
    assert said == ["right", "wrong", "right", "no_code", "right"], prompts
    notes = [row.extra_fields["kernel_note"] for row in rows]
    assert all("95 % interval" in note and " us against " in note and "% k0" in note for note in notes[::2]), notes
    assert "largest error" in notes[1] and notes[3]
    rewards = [row.extra_fields["turn_reward"] for row in rows]
    assert rewards[0] == rewards[2] > 0 == rewards[1] == rewards[3]
    assert prompts[1].startswith(prompts[0])

    def said(prompt: str) -> list[int]:
        """The turns in a prompt, and before them the task alone."""
        first, *others = prompt.split("<|im_start|>assistant\n")[:-1]
        assert first == prompts[0].removesuffix("<|im_start|>assistant\n")
        return [next(turn for turn in range(4) if other.startswith(f"{answers[turn]}<|im_end|>")) for other in others]

    assert said(prompts[2]) == [0, 1]
    assert tuple(said(prompts[4])) == kept
    trained, _ = play(tokenizer, answers, stts=stts)
    assert len(trained) == 3  # training plays max_turns


@pytest.mark.slow
def test_a_trajectory_that_the_machine_has_failed_pays_nothing_and_is_in_no_statistic(
    cluster: None, tokenizer: Any
) -> None:
    """A cage that does not exist stands for a machine that cannot judge."""
    well = [play(tokenizer, answers, max_turns=2)[0] for answers in ([FUSED, FUSED], [WRONG, FUSED])]
    (lost,), _ = play(tokenizer, [FUSED, FUSED], cage="no such cage", max_turns=2)
    said = lost.extra_fields
    assert said["failure"] == said["stop_reason"] == said["kernel_status"] == "infra" and said["stop_detail"]
    assert not said["valid_row"] and not any(lost.response_mask) and said["reward_extra_info"] == {}
    assert lost.reward_score == said["turn_reward"] == said["speedup"] == said["coverage"] == 0.0

    def columns(rows: list[tuple[str, int, AgentLoopOutput]]) -> dict[str, Any]:
        return {
            "traj_uid": [name for name, _, _ in rows],
            "turn_index": [turn for _, turn, _ in rows],
            "turn_reward": [row.extra_fields["turn_reward"] for _, _, row in rows],
            "valid_row": [row.extra_fields["valid_row"] for _, _, row in rows],
        }

    good = [(str(name), turn, row) for name, played in enumerate(well) for turn, row in enumerate(played)]
    for rows in (good, [*good, ("lost", 0, lost)]):
        mask = torch.tensor([[float(row.response_mask[0])] for _, _, row in rows])
        advantage, _ = trloo_advantage(torch.zeros_like(mask), mask, ["prompt"] * len(rows), **columns(rows))
        metrics = rollout_metrics(columns(rows), [{}] * len(rows), [row.extra_fields for _, _, row in rows])
        if rows is good:
            alone, before = advantage, metrics
    assert torch.equal(advantage[:4], alone) and not advantage[4].any()
    assert metrics.pop("rollout/failures/infra") == metrics.pop("rollout/failed_trajectories") == 1
    assert before.pop("rollout/failed_trajectories") == 0 and metrics == before
    assert {"trajectory/acc", "trajectory/fast_1.2_best"} <= metrics.keys()


def dump(folder: Path, answers: list[list[str]]) -> Path:
    rows = [
        {"input": CHAIN, "output": answer, "gts": CHAIN, "score": 0.0, "step": 7, "uid": f"a-b_{session}_{turn}"}
        for session, played in enumerate(answers)
        for turn, answer in enumerate(played)
    ]
    path = folder / "7.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    return path


@pytest.mark.seconds
def test_scaling_over_recorded_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = f"kcse {CHAIN}"
    path = dump(tmp_path, [[WRONG, FUSED, WRONG, NONE, NONE], [f"t {CHAIN}", slow, WRONG]])
    assert main(["kernels", "stts", str(path), "--window", "1", "--json"]) == 0
    told = capsys.readouterr().out
    found = json.loads(told.splitlines()[-1])
    assert (
        found["trajectories"] == 2
        and found["judged"] == 6 - 1
        and [row["turns"] for row in found["turns"]]
        == [
            1,
            2,
            3,
            4,
            5,
        ]
    )
    # A decoy and a wrong kernel count for nothing; the fused one is fast at its turn, and best from there on.
    assert [row["fast_1.0_last"] for row in found["turns"]] == [0, 0.5, 0, 0, 0]
    assert [row["fast_1.0_best"] for row in found["turns"]] == [0, 0.5, 0.5, 0.5, 0.5]
    assert {rule: row["fast_1.0_kept"] for rule, row in found["rules"].items()} == {
        "paper": 0.5,
        "released_best": 0.5,
        "last": 0,
    }
    assert found["rules"]["paper"]["reward"] > found["rules"]["last"]["reward"] == 0


def test_what_is_no_record_of_validation_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "1.jsonl"
    for text in ("", '{"output": "x", "gts": "mul"}\n', '{"output": "x", "gts": "mul", "uid": 3}\n'):
        path.write_text(text)
        assert main(["kernels", "stts", str(path)]) == 2
    assert "line 1" in capsys.readouterr().err


def test_a_dump_is_read_by_its_lines_whatever_the_model_wrote(tmp_path: Path) -> None:
    """verl writes text as it is, and a model may write what `str.splitlines` takes for the end of a line."""
    answer = f"{FUSED}\x85\u2028"
    row = {"uid": "t_0", "gts": CHAIN, "output": answer}
    dump = tmp_path / "1.jsonl"
    dump.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    ((task, answers),) = read(dump)
    assert answers == [answer] and task.text == CHAIN
