#!/usr/bin/env bash
# The same job on a Ray cluster that is running already, submitted as a Ray job. verl-ext must be installed on every
# node (pip install . in a checkout); a node without it fails with the name of the missing module instead of training without.
#   RAY_JOB_ADDRESS=http://head:8265 NODES=2 GPUS=8 MODEL=... TRAIN=... VAL=... bash examples/train_ray_cluster.sh
set -euo pipefail
: "${RAY_JOB_ADDRESS:?address of the job server of the cluster}" "${MODEL:?}" "${TRAIN:?}" "${VAL:?}"

ray job submit --address "$RAY_JOB_ADDRESS" -- \
    python -m verl.trainer.main_ppo "+recipe=${RECIPE:-trloo}" \
    data.train_files="$TRAIN" \
    data.val_files="$VAL" \
    actor_rollout_ref.model.path="$MODEL" \
    data.train_batch_size=256 \
    data.max_prompt_length=4096 \
    data.max_response_length=4096 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    trainer.n_gpus_per_node="${GPUS:-8}" \
    trainer.nnodes="${NODES:-1}" \
    trainer.save_freq=20 \
    trainer.test_freq=10 \
    trainer.project_name=verl_ext \
    trainer.experiment_name="${NAME:-cluster}" \
    "$@"
