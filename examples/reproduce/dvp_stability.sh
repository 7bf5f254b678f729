#!/usr/bin/env bash
# DVP, stability under sampler and trainer mismatch (arXiv 2512.23087), at the paper's scale, with verl's vLLM
# rollout.
# Made from recipe/dvp/stability.yaml by `python -m verl_ext.reproduce.scripts --write examples/reproduce`. Copy it to
# change it; the file itself is made anew.
#
# bash dvp_stability.sh CELL [SEED] [KEY=VALUE...]
# One cell and seed; `verl-ext reproduce run dvp/stability --cell CELL --seeds SEED` makes the same run and keeps the
# record from which `collect` makes the table. The same command goes on with a killed run.
#
# Claim: Training and sampling on the safe vocabulary only keeps the run stable where the plain policy suffers from
# the mismatch of sampler and trainer.
# Cost: 3 cells x 3 seeds on 1 node with 8 GPUs (80 GB; unverified); hours of a cell: not stated.
# Packages: vllm, math-verify.
# Left open by what was read:
# - No number is published in what was read; the claim is stability.
# - That the public fork equals the paper's experiments is inferred.
# - The fork prunes in the update only, in bypass mode with a REINFORCE loss (cell dvp_bypass); here the default
#   prunes the old-log-prob pass too (cell dvp).
# - A value of rho of e^-13 was found in no source; here it is the script's e^-12.
# - Data, estimator, hardware, time, steps and seeds are not stated; here they are DAPO mathematics, GRPO, and 300
#   steps.
set -euo pipefail

usage='usage: bash dvp_stability.sh CELL [SEED] [KEY=VALUE...]   CELL is none|dvp|dvp_bypass'
CELL=${1:?"$usage"}
SEED=${2:-0}
shift $(($# < 2 ? $# : 2))

# Prepared data (verl-ext reproduce prepare dvp/stability) and the folder of this run.
DATA=${DATA:-${VERL_EXT_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/verl_ext}/data}
RUN=${OUT:-$PWD/runs/scripts}/dvp.stability/full/$CELL/seed_$SEED
export VERL_FILE_LOGGER_PATH="$RUN/metrics.jsonl"

# What the cells differ in.
case "$CELL" in
none)
    # no pruning: the same importance weights
    cell=(
        '+recipe=[grpo]'
    )
    ;;
dvp)
    # DVP
    cell=(
        '+recipe=[grpo,dvp]'
        dvp.rho=6.144e-06
    )
    ;;
dvp_bypass)
    # DVP, released form: pruned in the update only, REINFORCE loss against the sampler's log-probabilities
    cell=(
        '+recipe=[grpo,dvp]'
        dvp.rho=6.144e-06
        algorithm.rollout_correction.bypass_mode=true
        algorithm.rollout_correction.loss_type=reinforce
        actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode
    )
    ;;
*)
    echo "$usage" >&2
    exit 2
    ;;
esac

mkdir -p "$RUN"
python -m verl.trainer.main_ppo "${cell[@]}" \
    "data.train_files=[$DATA/dapo_math.parquet]" \
    "data.val_files=[$DATA/aime25.parquet,$DATA/aime24.parquet]" \
    actor_rollout_ref.model.path=Qwen/Qwen3-8B-Base \
    data.train_batch_size=64 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.rollout.n=8 \
    data.max_response_length=8192 \
    actor_rollout_ref.actor.optim.lr=1e-06 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.use_kl_loss=false \
    algorithm.use_kl_in_reward=false \
    algorithm.rollout_correction.rollout_is=token \
    algorithm.rollout_correction.rollout_is_threshold=2.0 \
    actor_rollout_ref.rollout.temperature=1.0 \
    data.max_prompt_length=2048 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.n=16 \
    reward.custom_reward_function.path=pkg://verl_ext.rewards.math \
    reward.custom_reward_function.name=compute_score \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480 \
    trainer.test_freq=20 \
    trainer.save_freq=20 \
    "data.seed=$SEED" \
    "actor_rollout_ref.rollout.seed=$SEED" \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    'trainer.logger=[console,file]' \
    trainer.project_name=verl_ext \
    "trainer.experiment_name=dvp.stability.full.$CELL.seed_$SEED" \
    trainer.resume_mode=auto \
    "trainer.default_local_dir=$RUN/checkpoints" \
    "trainer.validation_data_dir=$RUN/validation" \
    "hydra.run.dir=$RUN/hydra" \
    trainer.total_training_steps=300 \
    "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH=$RUN/metrics.jsonl" \
    "$@"
