#!/usr/bin/env bash
# HGPO, ALFWorld, 7B (arXiv 2602.22817), at the paper's scale, with verl's vLLM rollout.
# Made from recipe/hgpo/alfworld_7b.yaml by `python -m verl_ext.reproduce.scripts --write examples/reproduce`. Copy it
# to change it; the file itself is made anew.
#
# bash hgpo_alfworld_7b.sh CELL [SEED] [KEY=VALUE...]
# One cell and seed; `verl-ext reproduce run hgpo/alfworld_7b --cell CELL --seeds SEED` makes the same run and keeps
# the record from which `collect` makes the table. The same command goes on with a killed run.
#
# Claim: Comparing steps inside groups that share their history beats comparing steps with equal observations (GiGPO),
# which beats comparing whole episodes (GRPO).
# Cost: 5 cells x 3 seeds on 1 node with 4 GPUs (80 GB; unverified); hours of a cell: not stated.
# Packages: vllm, alfworld.
# Left open by what was read:
# - The paper's body was not read; the numbers are secondary, and several sources agree on them.
# - An independent reproduction finds that one checkpoint's noise is about 3 points, and that HGPO and GiGPO are
#   about equal at 100 iterations.
# - The scripts' mini-batch of 256 is taken for rows (inferred). verl cuts a batch of 16 prompts in mini-batches of
#   at most 16 x 8 = 128 rows, so there are twice as many updates.
# - Which history GRPO's prompt shows is not stated; here it is K = 2.
# - Which tasks the evaluation seeds 123, 456 and 789 draw depends on the released environment's generator; here
#   each draws 128 tasks of its own.
# - Hardware and time are not stated in what was read.
set -euo pipefail

usage='usage: bash hgpo_alfworld_7b.sh CELL [SEED] [KEY=VALUE...]   CELL is grpo|gigpo_k2|gigpo_k4|hgpo_k2|hgpo_k4'
CELL=${1:?"$usage"}
SEED=${2:-0}
shift $(($# < 2 ? $# : 2))

# What you have to bring.
# ALFWORLD_DATA: folder that alfworld-download filled with the games
: "${ALFWORLD_DATA:?}"
export ALFWORLD_DATA

# Prepared data (verl-ext reproduce prepare hgpo/alfworld_7b) and the folder of this run.
DATA=${DATA:-${VERL_EXT_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/verl_ext}/data}
RUN=${OUT:-$PWD/runs/scripts}/hgpo.alfworld_7b/full/$CELL/seed_$SEED
export VERL_FILE_LOGGER_PATH="$RUN/metrics.jsonl"

# What the cells differ in.
case "$CELL" in
grpo)
    # GRPO: history in the prompt as in the K=2 rows (not stated)
    cell=(
        '+recipe=[grpo,step_wise]'
        algorithm.gamma=0.95
        verl_ext.environment.history_length=2
    )
    ;;
gigpo_k2)
    # GiGPO K=2
    cell=(
        '+recipe=[gigpo,step_wise]'
        algorithm.gigpo.mode=mean_std_norm
        verl_ext.environment.history_length=2
    )
    ;;
gigpo_k4)
    # GiGPO K=4
    cell=(
        '+recipe=[gigpo,step_wise]'
        algorithm.gigpo.mode=mean_std_norm
        verl_ext.environment.history_length=4
    )
    ;;
hgpo_k2)
    # HGPO K=2
    cell=(
        '+recipe=[hgpo,step_wise]'
        algorithm.hgpo.mode=mean_std_norm
        algorithm.hgpo.history_length=2
    )
    ;;
hgpo_k4)
    # HGPO K=4
    cell=(
        '+recipe=[hgpo,step_wise]'
        algorithm.hgpo.mode=mean_std_norm
        algorithm.hgpo.history_length=4
    )
    ;;
*)
    echo "$usage" >&2
    exit 2
    ;;
esac

mkdir -p "$RUN"
python -m verl.trainer.main_ppo "${cell[@]}" \
    "data.train_files=[$DATA/alfworld_train.parquet]" \
    "data.val_files=[$DATA/alfworld_in.parquet,$DATA/alfworld_out.parquet]" \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \
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
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    algorithm.use_kl_in_reward=false \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.4 \
    verl_ext.environment.max_steps=50 \
    verl_ext.environment.reward_scale=10.0 \
    verl_ext.environment.template=alfworld \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    trainer.test_freq=10 \
    trainer.save_freq=20 \
    "data.seed=$SEED" \
    "actor_rollout_ref.rollout.seed=$SEED" \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=4 \
    'trainer.logger=[console,file]' \
    trainer.project_name=verl_ext \
    "trainer.experiment_name=hgpo.alfworld_7b.full.$CELL.seed_$SEED" \
    trainer.resume_mode=auto \
    "trainer.default_local_dir=$RUN/checkpoints" \
    "trainer.validation_data_dir=$RUN/validation" \
    "hydra.run.dir=$RUN/hydra" \
    trainer.total_training_steps=160 \
    "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH=$RUN/metrics.jsonl" \
    "$@"
