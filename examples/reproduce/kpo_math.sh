#!/usr/bin/env bash
# KPO, mathematics with four updates a batch (arXiv 2602.10609), at the paper's scale, with verl's vLLM rollout.
# Made from recipe/kpo/math.yaml by `python -m verl_ext.reproduce.scripts --write examples/reproduce`. Copy it to
# change it; the file itself is made anew.
#
# bash kpo_math.sh CELL [SEED] [KEY=VALUE...]
# One cell and seed; `verl-ext reproduce run kpo/math --cell CELL --seeds SEED` makes the same run and keeps the
# record from which `collect` makes the table. The same command goes on with a killed run.
#
# Claim: Filtering the per-token log ratio before it is clipped beats the token ratio (GRPO), the sequence ratio
# (GSPO) and the geometric mean (GMPO) when a batch is used for several updates.
# Cost: 5 cells x 3 seeds on 1 node with 2 GPUs (80 GB; certain); hours of a cell: not stated.
# Packages: vllm, math-verify.
# Left open by what was read:
# - The paper's body was not read; the numbers are secondary and the table is incomplete.
# - The model is Qwen3-4B; some notes say Base (unresolved).
# - The baselines use clip 0.2 / 0.4, KPO 3e-4 / 4e-4, so the filter and the tiny clip are not separated.
# - How the baselines' losses are aggregated is not stated; here GRPO is verl's token-mean, GSPO its sequence mean,
#   GMPO verl's geo_mean.
# - Validation uses top_p 0.7 as the script does; the paper is said to use 1.0 (secondary).
# - The unclipped variant with Q = 1e-4 is known from secondary texts only.
# - Which subset of DAPO's mathematics is trained on is not stated; here it is all of the data set's distinct
#   problems.
# - The number of seeds is not stated.
set -euo pipefail

usage='usage: bash kpo_math.sh CELL [SEED] [KEY=VALUE...]   CELL is grpo|gspo|gmpo|kpo|kpo_unclipped'
CELL=${1:?"$usage"}
SEED=${2:-0}
shift $(($# < 2 ? $# : 2))

# Prepared data (verl-ext reproduce prepare kpo/math) and the folder of this run.
DATA=${DATA:-${VERL_EXT_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/verl_ext}/data}
RUN=${OUT:-$PWD/runs/scripts}/kpo.math/full/$CELL/seed_$SEED
export VERL_FILE_LOGGER_PATH="$RUN/metrics.jsonl"

# What the cells differ in.
case "$CELL" in
grpo)
    # GRPO
    cell=(
        '+recipe=[grpo]'
        actor_rollout_ref.actor.clip_ratio_low=0.2
        actor_rollout_ref.actor.clip_ratio_high=0.4
    )
    ;;
gspo)
    # GSPO: clip range as stated for the baselines; GSPO's own paper uses 3e-4 / 4e-4
    cell=(
        '+recipe=[grpo,gspo]'
        actor_rollout_ref.actor.clip_ratio_low=0.2
        actor_rollout_ref.actor.clip_ratio_high=0.4
    )
    ;;
gmpo)
    # GMPO: verl's loss geo_mean
    cell=(
        '+recipe=[grpo]'
        actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean
        actor_rollout_ref.actor.clip_ratio_low=0.2
        actor_rollout_ref.actor.clip_ratio_high=0.4
    )
    ;;
kpo)
    # KPO
    cell=(
        '+recipe=[grpo,kpo]'
        actor_rollout_ref.actor.policy_loss.kalman_q=1e-06
        actor_rollout_ref.actor.clip_ratio_low=0.0003
        actor_rollout_ref.actor.clip_ratio_high=0.0004
    )
    ;;
kpo_unclipped)
    # KPO, unclipped: Q = 1e-4 from secondary texts
    cell=(
        '+recipe=[grpo,kpo]'
        actor_rollout_ref.actor.policy_loss.is_clip=false
        actor_rollout_ref.actor.policy_loss.kalman_q=0.0001
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
    "data.val_files=[$DATA/aime24.parquet,$DATA/aime25.parquet,$DATA/math500.parquet,$DATA/minerva_math.parquet]" \
    actor_rollout_ref.model.path=Qwen/Qwen3-4B \
    data.train_batch_size=32 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    data.max_prompt_length=1024 \
    data.max_response_length=4096 \
    +data.apply_chat_template_kwargs.enable_thinking=false \
    actor_rollout_ref.actor.optim.lr=1e-06 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.grad_clip=1.0 \
    actor_rollout_ref.actor.use_kl_loss=false \
    algorithm.use_kl_in_reward=false \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.n=16 \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
    trainer.total_epochs=2 \
    data.filter_overlong_prompts=true \
    reward.custom_reward_function.path=pkg://verl_ext.rewards.math \
    reward.custom_reward_function.name=compute_score \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    trainer.test_freq=20 \
    trainer.save_freq=50 \
    "data.seed=$SEED" \
    "actor_rollout_ref.rollout.seed=$SEED" \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=2 \
    'trainer.logger=[console,file]' \
    trainer.project_name=verl_ext \
    "trainer.experiment_name=kpo.math.full.$CELL.seed_$SEED" \
    trainer.resume_mode=auto \
    "trainer.default_local_dir=$RUN/checkpoints" \
    "trainer.validation_data_dir=$RUN/validation" \
    "hydra.run.dir=$RUN/hydra" \
    "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH=$RUN/metrics.jsonl" \
    "$@"
