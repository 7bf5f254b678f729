#!/usr/bin/env bash
# OTB, four samples a prompt against thirty-two (arXiv 2602.07078), at the paper's scale, with verl's vLLM rollout.
# Made from recipe/otb/samples.yaml by `python -m verl_ext.reproduce.scripts --write examples/reproduce`. Copy it to
# change it; the file itself is made anew.
#
# bash otb_samples.sh CELL [SEED] [KEY=VALUE...]
# One cell and seed; `verl-ext reproduce run otb/samples --cell CELL --seeds SEED` makes the same run and keeps the
# record from which `collect` makes the table. The same command goes on with a killed run.
#
# Claim: With the optimal token baseline 4 samples a prompt reach what the group mean reaches with 32, for over 65 %
# fewer tokens.
# Cost: 5 cells x 3 seeds on 1 node with 8 GPUs (80 GB; unverified); hours of a cell: not stated.
# Packages: vllm, math-verify.
# Left open by what was read:
# - The model, data and metric of the comparison of 4 and 32 samples are not stated in what was read; the settings
#   here are those of the single-turn runs (batch 64, lr 1e-6, DAPO mathematics).
# - The tool-integrated runs (Qwen2.5-7B, batch = mini-batch = 128, n 16, response 8192, at most 5 turns) need a
#   code interpreter, which is not part of this package.
# - Of the single-turn runs Qwen3-8B-Base and Qwen3-14B-Base are named; here it is 8B. Responses go up to 16k
#   tokens.
# - How the DAPO problems were filtered is not stated; here it is all of the data set's distinct problems.
# - Whether the published baseline includes the sample itself is not verified; the released code does.
# - Peak avg@32 values of a leaderboard exist in a scrape only and are not quoted.
# - Hardware, time, steps and seeds are not stated.
set -euo pipefail

usage='usage: bash otb_samples.sh CELL [SEED] [KEY=VALUE...]   CELL is group_mean_n4|group_mean_n32|rloo_n4|opo_n4|otb_n4'
CELL=${1:?"$usage"}
SEED=${2:-0}
shift $(($# < 2 ? $# : 2))

# Prepared data (verl-ext reproduce prepare otb/samples) and the folder of this run.
DATA=${DATA:-${VERL_EXT_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/verl_ext}/data}
RUN=${OUT:-$PWD/runs/scripts}/otb.samples/full/$CELL/seed_$SEED
export VERL_FILE_LOGGER_PATH="$RUN/metrics.jsonl"

# What the cells differ in.
case "$CELL" in
group_mean_n4)
    # group mean, n 4
    cell=(
        '+recipe=[grpo]'
        algorithm.norm_adv_by_std_in_grpo=false
        actor_rollout_ref.rollout.n=4
    )
    ;;
group_mean_n32)
    # group mean, n 32
    cell=(
        '+recipe=[grpo]'
        algorithm.norm_adv_by_std_in_grpo=false
        actor_rollout_ref.rollout.n=32
    )
    ;;
rloo_n4)
    # RLOO, n 4: one of the paper's baselines
    cell=(
        '+recipe=[rloo]'
        actor_rollout_ref.rollout.n=4
    )
    ;;
opo_n4)
    # OPO, n 4: verl's estimator opo; one of the paper's baselines
    cell=(
        '+recipe=[grpo]'
        algorithm.mix.grpo=0.0
        +algorithm.mix.opo=1.0
        actor_rollout_ref.rollout.n=4
    )
    ;;
otb_n4)
    # OTB, n 4
    cell=(
        '+recipe=[otb]'
        actor_rollout_ref.rollout.n=4
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
    actor_rollout_ref.actor.optim.lr=1e-06 \
    data.max_response_length=16384 \
    data.max_prompt_length=2048 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.actor.use_kl_loss=false \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.n=32 \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
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
    "trainer.experiment_name=otb.samples.full.$CELL.seed_$SEED" \
    trainer.resume_mode=auto \
    "trainer.default_local_dir=$RUN/checkpoints" \
    "trainer.validation_data_dir=$RUN/validation" \
    "hydra.run.dir=$RUN/hydra" \
    trainer.total_training_steps=300 \
    "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH=$RUN/metrics.jsonl" \
    "$@"
