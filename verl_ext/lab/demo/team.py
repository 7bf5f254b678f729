# SPDX-License-Identifier: Apache-2.0
"""The demo's team: a solver, and a reviser whose success is worth a tenth.

Both see sums of two digits. The solver answers; a right answer ends the game with a reward of 1.
Else the reviser sees the answer with the verifier's feedback and has the second and last try, worth ``late_reward``.
So the reviser's rewards are 0 or 0.1 where the solver's are 0 to 1: against a baseline of all turns of the prompt the
reviser's right answers look nearly as bad as its wrong ones, against its own they do not. That is what Dr. MAS's
normalisation by agent is for (arXiv 2602.08847).

The agents have no role prompt: each knows its part from what it is shown, in the words of the warm-up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_ext.rollout.orchestra import BoundAgent, Outcome, Task, agent, orchestra
from verl_ext.rollout.reasoning_gym_task import ReasoningGymTask

NAME = "second_try"


@agent(role="")
def solver(text: str) -> str | None:
    """The first try."""
    return text.strip() or None


@agent(role="")
def reviser(text: str) -> str | None:
    """The second try."""
    return text.strip() or None


@orchestra(NAME)
async def second_try(task: Task, solver: BoundAgent, reviser: BoundAgent, *, late_reward: float = 0.1) -> Outcome:
    """Solve; if that failed, revise, for less.

    Options:
        late_reward: reward of a right answer in the second try; in the first it is 1.
    """
    problem = ReasoningGymTask.from_extra_info(task.extra_info)
    first = await solver(task.messages)
    verdict = await problem.judge_async(first.text)
    first.valid = verdict.parsed is not None
    if verdict.solved:
        return Outcome(1.0, first.text, {"solved_first": 1.0, "solved_late": 0.0})
    said = [{"role": "assistant", "content": first.text}, {"role": "user", "content": verdict.feedback}]
    second = await reviser([*task.messages, *said])
    verdict = await problem.judge_async(second.text)
    second.valid = verdict.parsed is not None
    late = float(verdict.solved)
    return Outcome(late_reward * late, second.text, {"solved_first": 0.0, "solved_late": late})


def build_team(folder: Path, demo: Any) -> dict[str, Any]:
    """A model and its questions as the arithmetic demo makes them, for the team to play (``data/``, ``model/``).

    Sums of two digits are a table of 200, which a model as small as this knows by heart or not at all. So validation
    asks the sums of training, drawn anew: the questions that the demo holds out would ask for what nobody has taught.

    `demo` are the assets of :func:`verl_ext.lab.demo.prepare_demo`; else as a :data:`~verl_ext.lab.demo.assets.Build`.
    Raises ValueError: there are not more training than validation questions.
    """
    import shutil

    import pyarrow.parquet as pq

    from verl_ext.rollout.environments.data import write_parquet
    from verl_ext.rollout.orchestra.loop import AGENT_NAME

    shutil.copytree(demo.model_path, folder / "model")
    rows = [{**row, "agent_name": AGENT_NAME} for row in pq.read_table(demo.train_file).to_pylist()]
    size = pq.read_metadata(demo.val_file).num_rows
    if not 0 < size < len(rows):
        raise ValueError(f"{len(rows)} training questions cannot give {size} to validation; make train_size larger")
    for split, part in (("train", rows[:-size]), ("val", rows[-size:])):
        own = [{**row, "extra_info": {**row["extra_info"], "split": split}} for row in part]
        write_parquet(own, folder / "data" / f"{split}.parquet")
    return {
        "task": NAME,
        "agent_loop": AGENT_NAME,
        "prompt_length": demo.prompt_length,
        "response_length": demo.response_length,
        "measured": demo.measured,
    }
