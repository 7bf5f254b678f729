#!/usr/bin/env bash
# Trains examples/gateway/agent.py, three tries at a sum with OpenAI's client, through the gateway on the CPU: 20 steps.
#   bash examples/gateway/train_cpu.sh [folder] [further Hydra overrides]
# Needs `pip install openai`. SEED is of the model, the data and the sampling.
set -euo pipefail

HERE=$(cd "$(dirname "$0")" && pwd)
OUT=${1:-runs/gateway}
SEED=${SEED:-0}
shift || true
verl-ext prepare sums --seed "$SEED" --out "$OUT/sums"
python - "$OUT" <<'PYTHON'
import sys

import pandas

for split in ("train", "val"):  # the gateway plays rows that name no other agent loop
    rows = pandas.read_parquet(f"{sys.argv[1]}/sums/data/{split}.parquet")
    rows.drop(columns="agent_name").to_parquet(f"{sys.argv[1]}/{split}.parquet")
PYTHON

VERL_FILE_LOGGER_PATH="$OUT/metrics.jsonl" python -m verl.trainer.main_ppo '+recipe=[trloo,gateway,cpu]' \
    verl_ext.gateway.agent="$HERE/agent.py:solve" \
    data.train_files="$OUT/train.parquet" \
    data.val_files="$OUT/val.parquet" \
    data.seed="$SEED" \
    actor_rollout_ref.model.path="$OUT/sums/model" \
    actor_rollout_ref.rollout.seed="$SEED" \
    data.train_batch_size=16 \
    data.max_prompt_length=256 \
    data.max_response_length=16 \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.optim.lr=3e-4 \
    trainer.total_training_steps=20 \
    trainer.val_before_train=false \
    trainer.test_freq=-1 \
    trainer.project_name=verl_ext \
    trainer.experiment_name=gateway \
    trainer.default_local_dir="$OUT/checkpoints" \
    verl_ext.rollouts_dir="$OUT/rollouts" \
    hydra.run.dir="$OUT/hydra" \
    "$@"
verl-ext report "$OUT" --out "$OUT/report.html"
