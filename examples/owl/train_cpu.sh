#!/usr/bin/env bash
# Trains the planner of OWL's Workforce on the CPU; coordinator and workers are the same model, frozen.
#   bash examples/owl/train_cpu.sh [folder] [further Hydra overrides]
# README.md says what has to be installed. CAMEL names the Python that has camel-ai.
set -euo pipefail

HERE=$(cd "$(dirname "$0")" && pwd)
CAMEL=${CAMEL:-.venv-owl/bin/python}
OUT=${1:-runs/owl}
shift || true
mkdir -p "$OUT"
python "$HERE/prepare.py" "$OUT"
verl-ext prepare smollm2 --out "$OUT/smollm2"
cp "$HERE/chat_template.jinja" "$OUT/smollm2/model/"  # SmolLM2's own shows no tools

VERL_FILE_LOGGER_PATH="$OUT/metrics.jsonl" python "$HERE/tools.py" "$OUT/corpus.jsonl" \
    python -m verl.trainer.main_ppo '+recipe=[trloo,gateway,cpu]' \
    verl_ext.gateway.command="[$CAMEL,$HERE/workforce.py]" \
    '+verl_ext.gateway.agents={planner:{model:policy},coordinator:{model:frozen},worker:{model:frozen,max_tokens:96}}' \
    +verl_ext.models.frozen.trained=false \
    'verl_ext.train_agents=[planner]' \
    verl_ext.updates_per_batch=1 \
    verl_ext.gateway.call_timeout_s=1800 \
    verl_ext.gateway.agent_timeout_s=3600 \
    actor_rollout_ref.rollout.multi_turn.format=hermes \
    data.train_files="$OUT/train.parquet" \
    data.val_files="$OUT/val.parquet" \
    actor_rollout_ref.model.path="$OUT/smollm2/model" \
    data.train_batch_size=1 \
    data.max_prompt_length=3072 \
    data.max_response_length=160 \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.max_num_seqs=8 \
    actor_rollout_ref.actor.ppo_mini_batch_size=1 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=3328 \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    trainer.total_training_steps=3 \
    trainer.val_before_train=false \
    trainer.test_freq=-1 \
    trainer.project_name=verl_ext \
    trainer.experiment_name=owl \
    trainer.default_local_dir="$OUT/checkpoints" \
    verl_ext.rollouts_dir="$OUT/rollouts" \
    hydra.run.dir="$OUT/hydra" \
    "$@"
