#!/usr/bin/env bash
# GiGPO, WebShop (arXiv 2505.10978), at the paper's scale, with verl's vLLM rollout.
# Made from recipe/gigpo/webshop.yaml by `python -m verl_ext.reproduce.scripts --write examples/reproduce`. Copy it to
# change it; the file itself is made anew.
#
# bash gigpo_webshop.sh CELL [SEED] [KEY=VALUE...]
# One cell and seed; `verl-ext reproduce run gigpo/webshop --cell CELL --seeds SEED` makes the same run and keeps the
# record from which `collect` makes the table. The same command goes on with a killed run.
#
# Claim: A step advantage among rows with the same observation beats comparing whole episodes (GRPO).
# Cost: 2 cells x 3 seeds on 1 node with 2 GPUs (80 GB; unverified); hours of a cell: not stated.
# Packages: vllm.
# Left open by what was read:
# - The README does not say over how many seeds its numbers are means. WebShop's number is taken for the success
#   rate.
# - The scripts say 150 epochs; one step an epoch is assumed (inferred).
# - The KL coefficient, learning rate, clip range, temperatures and entropy bonus are those of the HGPO scripts of
#   the same repository; what was read of the GiGPO scripts does not state them.
# - The scripts' mini-batch of 64 is taken for rows (inferred).
# - The length of the history in the prompt is not stated in what was read; here it is 2.
# - Hardware and time are not stated in what was read.
set -euo pipefail

usage='usage: bash gigpo_webshop.sh CELL [SEED] [KEY=VALUE...]   CELL is grpo|gigpo'
CELL=${1:?"$usage"}
SEED=${2:-0}
shift $(($# < 2 ? $# : 2))

# What you have to bring.
# PYTHONPATH: with a checkout of WebShop on it, whose setup.sh has fetched the products and built the search index
: "${PYTHONPATH:?}"
export PYTHONPATH

# Prepared data (verl-ext reproduce prepare gigpo/webshop) and the folder of this run.
DATA=${DATA:-${VERL_EXT_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/verl_ext}/data}
RUN=${OUT:-$PWD/runs/scripts}/gigpo.webshop/full/$CELL/seed_$SEED
export VERL_FILE_LOGGER_PATH="$RUN/metrics.jsonl"

# What the cells differ in.
case "$CELL" in
grpo)
    # GRPO, 1.5B
    cell=(
        '+recipe=[grpo,step_wise]'
        algorithm.gamma=0.95
    )
    ;;
gigpo)
    # GiGPO, 1.5B
    cell=(
        '+recipe=[gigpo,step_wise]'
        algorithm.gigpo.mode=mean_norm
        algorithm.gigpo.step_advantage_w=1.0
    )
    ;;
*)
    echo "$usage" >&2
    exit 2
    ;;
esac

mkdir -p "$RUN"
python -m verl.trainer.main_ppo "${cell[@]}" \
    "data.train_files=[$DATA/webshop_train.parquet]" \
    "data.val_files=[$DATA/webshop_test.parquet]" \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct \
    data.train_batch_size=16 \
    actor_rollout_ref.rollout.n=8 \
    data.max_prompt_length=4096 \
    data.max_response_length=512 \
    actor_rollout_ref.actor.optim.lr=1e-06 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.clip_ratio=0.2 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.2 \
    actor_rollout_ref.actor.clip_ratio_c=3.0 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.actor.entropy_coeff=0.001 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    algorithm.use_kl_in_reward=false \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.4 \
    verl_ext.environment.max_steps=15 \
    verl_ext.environment.reward_scale=10.0 \
    verl_ext.environment.template=webshop \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    trainer.test_freq=10 \
    trainer.save_freq=20 \
    verl_ext.environment.history_length=2 \
    "data.seed=$SEED" \
    "actor_rollout_ref.rollout.seed=$SEED" \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=2 \
    'trainer.logger=[console,file]' \
    trainer.project_name=verl_ext \
    "trainer.experiment_name=gigpo.webshop.full.$CELL.seed_$SEED" \
    trainer.resume_mode=auto \
    "trainer.default_local_dir=$RUN/checkpoints" \
    "trainer.validation_data_dir=$RUN/validation" \
    "hydra.run.dir=$RUN/hydra" \
    trainer.total_training_steps=150 \
    "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH=$RUN/metrics.jsonl" \
    "$@"
