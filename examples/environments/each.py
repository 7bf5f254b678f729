# SPDX-License-Identifier: Apache-2.0
"""A training step with every dataset of reasoning-gym and games of TextArena, and a table of what came of it.

    python examples/environments/each.py [folder]

Makes an untrained model of 400,000 parameters and three runs on the CPU: one with a question of each dataset (recipe
trloo), one with the games for one player (gigpo, step_wise), one with those for two (dr_mas, the team textarena_game).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from verl_ext.lab.demo.data import write_task
from verl_ext.lab.demo.model import Codec, make_model, save_model, train_tokenizer
from verl_ext.rollout.environments.data import build_rows, write_parquet
from verl_ext.rollout.environments.protocol import reset_result
from verl_ext.rollout.environments.shipped.textarena_env import TextArenaEnvironment, TextArenaGame

ONE = (
    "2048 Bandit Blackjack Countdown Crosswords FifteenPuzzle FrozenLake GuessTheNumber LightsOut Mastermind "
    "Minesweeper PegJump Secretary Set Sokoban Sudoku ThreeCardMonte TowerOfHanoi"
).split()
TWO = (
    "ConnectFour GameOfPureStrategy IteratedPrisonersDilemma IteratedRockPaperScissors KuhnPoker Nim PigDice SimpleTak "
    "TicTacToe TruthAndDeception"
).split()
PROMPT = 8192


def questions(folder: Path) -> tuple[dict[str, dict], list[str]]:
    """A row of data of each dataset of reasoning-gym, and a line for each dataset that gives none."""
    import pyarrow.parquet as pq
    from reasoning_gym.factory import DATASETS

    rows, refused = {}, []
    for name in sorted(DATASETS):
        try:
            write_task(folder / name, name, {}, train_size=1, val_size=1, seed=0, split=False)
            rows[name] = pq.read_table(folder / name / "train.parquet").to_pylist()[0]
        except Exception as error:
            refused.append(f"| {name} | 0 | 0 | 0 | {error} |".replace("\n", " "))
    return rows, refused


def train(folder: Path, model: Path, rows: dict[str, dict], told: dict[str, str], *words: str) -> list[str]:
    """A line for each name, of what the step had of its row of data; its first prompt has the text `told`."""
    write_parquet(list(rows.values()), folder / "data.parquet")
    files = [f"data.{split}_files={folder / 'data.parquet'}" for split in ("train", "val")]
    sizes = [f"data.train_batch_size={len(rows)}", f"actor_rollout_ref.actor.ppo_mini_batch_size={len(rows)}"]
    lengths = [f"data.max_prompt_length={PROMPT}", "data.max_response_length=16", "actor_rollout_ref.rollout.n=2"]
    steps = ["trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    written = [f"verl_ext.rollouts_dir={folder / 'rollouts'}", f"hydra.run.dir={folder / 'hydra'}"]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words, *files, *sizes, *lengths, *steps, *written]
    command += [f"actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={folder / 'checkpoints'}"]
    variables = {**os.environ, "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl")}
    subprocess.run(command, check=True, env=variables)
    played = [json.loads(line) for path in folder.glob("rollouts/*.jsonl") for line in path.open()]
    lines = []
    for name, text in told.items():
        own = [one for one in played if text.strip() in one["turns"][0]["prompt"]]
        turns = [turn for one in own for turn in one["turns"]]
        failed = sorted({one["failure"] for one in own} - {""})
        longest = max((turn["prompt_tokens"] for turn in turns), default=0)
        lines.append(f"| {name} | {len(own)} | {len(turns)} | {longest} | {', '.join(failed) or 'none'} |")
    return lines


def main(folder: Path) -> None:
    asked, refused = questions(folder / "data")
    told = {name: row["prompt"][-1]["content"] for name, row in asked.items()}
    codec = Codec(train_tokenizer(list(told.values()), 2048))
    save_model(make_model(codec, 128, 2, 2, 0.05, PROMPT + 64), codec, folder / "model")
    table = ["| | rollouts | turns | tokens of the longest prompt | failures |", "|---|---|---|---|---|", *refused]
    once = "++actor_rollout_ref.rollout.custom.multi_turn.max_turns=1"
    table += train(folder / "questions", folder / "model", asked, told, "+recipe=[trloo,cpu]", once)
    team = [f"+verl_ext.orchestra.{word}" for word in ("name=textarena_game", "options.max_turns=4")]
    games: list[tuple[list[str], str, type[TextArenaEnvironment], list[str]]] = [
        (ONE, "", TextArenaEnvironment, ["+recipe=[gigpo,step_wise,cpu]", "verl_ext.environment.max_steps=2"]),
        (TWO, "textarena_game", TextArenaGame, ["+recipe=[dr_mas,cpu]", *team]),
    ]
    for names, player, kind, words in games:
        made = {name: build_rows("textarena", [3], {"game": f"{name}-v0"}, orchestra=player)[0] for name in names}
        told = {name: reset_result(kind(f"{name}-v0").reset(3)).task for name in names}
        table += train(folder / (player or "one"), folder / "model", made, told, *words)
    (folder / "table.md").write_text("\n".join(table) + "\n")
    print("\n".join(table))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/each").resolve())
