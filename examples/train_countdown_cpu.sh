#!/usr/bin/env bash
# A task whose verifier evaluates the answer (reasoning-gym's countdown), in the sandbox, on the CPU: about a minute.
#   bash examples/train_countdown_cpu.sh [folder] [further Hydra overrides]
# The demo's small model has never seen the task; what is shown is that any answer is judged, and what that costs.
set -euo pipefail

OUT=${1:-runs/countdown}
shift || true
verl-ext sandbox --quick --cage required
verl-ext prepare demo --out "$OUT/demo"
python - "$OUT/data" <<'PYTHON'
import sys
from pathlib import Path

from verl_ext.lab.demo.data import write_task

numbers = {"min_numbers": 2, "max_numbers": 3, "max_value": 20, "min_target": 10, "max_target": 99}
write_task(Path(sys.argv[1]), "countdown", numbers, train_size=128, val_size=16, seed=0)
PYTHON

VERL_FILE_LOGGER_PATH="$OUT/metrics.jsonl" python -m verl.trainer.main_ppo '+recipe=[trloo,cpu]' \
    data.train_files="$OUT/data/train.parquet" \
    data.val_files="$OUT/data/val.parquet" \
    actor_rollout_ref.model.path="$OUT/demo/model" \
    actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_multi_turn \
    +actor_rollout_ref.rollout.custom.multi_turn.turn_reward=score \
    data.train_batch_size=16 \
    data.max_prompt_length=1024 \
    data.max_response_length=16 \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.optim.lr=3e-4 \
    trainer.total_training_steps=3 \
    trainer.val_before_train=false \
    trainer.test_freq=3 \
    trainer.project_name=verl_ext \
    trainer.experiment_name=countdown \
    trainer.default_local_dir="$OUT/checkpoints" \
    verl_ext.rollouts_dir="$OUT/rollouts" \
    hydra.run.dir="$OUT/hydra" \
    "$@"

python - "$OUT/metrics.jsonl" <<'PYTHON'
import json
import sys

for line in map(json.loads, open(sys.argv[1])):
    found = line["data"]
    if "sandbox/calls" in found:
        calls, seconds, share = (found[f"sandbox/{name}"] for name in ("calls", "seconds", "share_of_step"))
        rate = calls / found["timing_s/step"]
        print(f"step {line['step']}: {calls:.0f} calls in the sandbox, {rate:.0f} a second of the step; "
              f"their processes lived {seconds:.2f} s, {share:.3f} of it")
PYTHON
