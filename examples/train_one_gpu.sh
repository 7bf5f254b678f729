#!/usr/bin/env bash
# TRLOO on one GPU with verl's vLLM rollout. The recipe sets nothing but the algorithm: model, data, memory and rollout
# are verl's own keys, as in verl's examples.
#   MODEL=Qwen/Qwen2.5-1.5B-Instruct TRAIN=train.parquet VAL=val.parquet bash examples/train_one_gpu.sh
# RECIPE=trloo, or several that mix: RECIPE='[trloo,otb]'.
set -euo pipefail
: "${MODEL:?a model folder or hub name}" "${TRAIN:?training parquet}" "${VAL:?validation parquet}"

python -m verl.trainer.main_ppo "+recipe=${RECIPE:-trloo}" \
    data.train_files="$TRAIN" \
    data.val_files="$VAL" \
    actor_rollout_ref.model.path="$MODEL" \
    data.train_batch_size=64 \
    data.max_prompt_length=2048 \
    data.max_response_length=2048 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    trainer.save_freq=20 \
    trainer.test_freq=10 \
    trainer.project_name=verl_ext \
    trainer.experiment_name="${NAME:-one_gpu}" \
    "$@"
