#!/usr/bin/env bash
# Dr. Kernel, KernelBench (arXiv 2602.05885), at the paper's scale, with verl's vLLM rollout.
# Made from recipe/trloo/kernelbench.yaml by `python -m verl_ext.reproduce.scripts --write examples/reproduce`. Copy
# it to change it; the file itself is made anew.
#
# bash trloo_kernelbench.sh CELL [SEED] [KEY=VALUE...]
# One cell and seed; `verl-ext reproduce run trloo/kernelbench --cell CELL --seeds SEED` makes the same run and keeps
# the record from which `collect` makes the table. The same command goes on with a killed run.
#
# Claim: The unbiased turn-level leave-one-out baseline trains better kernel writers than the self-inclusive
# turn-level mean.
# Cost: 3 cells x 3 seeds on 1 node with 8 GPUs (80 GB; unverified); hours of a cell: not stated.
# Packages: vllm.
# Left open by what was read:
# - Dr. Kernel's rows are trained with TRLOO, geometric rejection of mismatched samples (MRS), the profiling reward
#   and rejection by profile (PRS). PRS is not part of this package, and MRS is verl's row-wise seq_mean_k1 without
#   the veto; the published code takes the mean over the trajectory and adds a veto at 1e-4.
# - Kernels have to be compiled, timed and profiled by a server with GPUs; the agent loop that does so is yours
#   (KERNEL_AGENT_LOOP).
# - The cold-started model is the published starting point; whether its weights can be had is not stated. Its data
#   are drkernel-coldstart-8k (SFT in the scripts with lr 2e-5, batch 64, 4 epochs, 18432 tokens; in the paper lr
#   1e-6, batch 256).
# - Prompt and response lengths are the launch script's, 10240 and 8192 a turn; the paper says 32768 in total.
# - The mini-batch arithmetic of the released code makes the loss three times too small; here one update divides by
#   the samples of the batch.
# - Hardware, time and number of seeds are not stated in what was read. The paper's table has no row of a
#   GRPO-trained model.
# - With a constant number of samples the leave-one-out factor is a constant that Adam removes (inferred); do not
#   expect the gap to GRPO from the estimator alone.
# - The released code masks turns with reward <= 0 after a success (mask_regressions), which the paper does not
#   have; here it is off.
set -euo pipefail

usage='usage: bash trloo_kernelbench.sh CELL [SEED] [KEY=VALUE...]   CELL is grpo_turn|grpo|trloo'
CELL=${1:?"$usage"}
SEED=${2:-0}
shift $(($# < 2 ? $# : 2))

# What you have to bring.
# COLD_START_MODEL: folder or hub name of Qwen3-8B-Base after the cold-start SFT
: "${COLD_START_MODEL:?}"
export COLD_START_MODEL
# KERNEL_AGENT_LOOP: YAML file for verl's agent_loop_config_path with an agent loop called kernel: three turns, one
# output a turn with turn_reward; its last output's reward_extra_info has acc (1 if correct) and speedup
: "${KERNEL_AGENT_LOOP:?}"
export KERNEL_AGENT_LOOP

# Prepared data (verl-ext reproduce prepare trloo/kernelbench) and the folder of this run.
DATA=${DATA:-${VERL_EXT_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/verl_ext}/data}
RUN=${OUT:-$PWD/runs/scripts}/trloo.kernelbench/full/$CELL/seed_$SEED
export VERL_FILE_LOGGER_PATH="$RUN/metrics.jsonl"

# What the cells differ in.
case "$CELL" in
grpo_turn)
    # GRPO a turn: turn mean without std, self included: the code base's grpo
    cell=(
        '+recipe=[trloo]'
        algorithm.trloo.baseline=mean
    )
    ;;
grpo)
    # GRPO: verl's own, over whole samples
    cell=(
        '+recipe=[grpo]'
    )
    ;;
trloo)
    # TRLOO (Dr.Kernel-8B without PRS)
    cell=(
        '+recipe=[trloo]'
    )
    ;;
*)
    echo "$usage" >&2
    exit 2
    ;;
esac

mkdir -p "$RUN"
python -m verl.trainer.main_ppo "${cell[@]}" \
    "data.train_files=[$DATA/drkernel_rl.parquet]" \
    "data.val_files=[$DATA/kernelbench_level1.parquet,$DATA/kernelbench_level2.parquet,$DATA/kernelbench_level3.parquet]" \
    "actor_rollout_ref.model.path=$COLD_START_MODEL" \
    data.train_batch_size=16 \
    actor_rollout_ref.rollout.n=16 \
    data.max_prompt_length=10240 \
    data.max_response_length=8192 \
    actor_rollout_ref.actor.optim.lr=1e-06 \
    actor_rollout_ref.actor.optim.lr_scheduler_type=constant \
    actor_rollout_ref.actor.optim.weight_decay=0.01 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    verl_ext.updates_per_batch=1 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=3.0 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \
    actor_rollout_ref.actor.loss_scale_factor=1000 \
    actor_rollout_ref.actor.grad_clip=1.0 \
    actor_rollout_ref.actor.use_kl_loss=false \
    algorithm.use_kl_in_reward=false \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.top_p=1.0 \
    actor_rollout_ref.rollout.top_k=-1 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.n=8 \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.95 \
    algorithm.gamma=1.0 \
    algorithm.rollout_correction.rollout_rs=seq_mean_k1 \
    algorithm.rollout_correction.rollout_rs_threshold=0.999_1.001 \
    "actor_rollout_ref.rollout.agent.agent_loop_config_path=$KERNEL_AGENT_LOOP" \
    actor_rollout_ref.rollout.agent.default_agent_loop=kernel \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \
    trainer.test_freq=20 \
    trainer.save_freq=20 \
    "data.seed=$SEED" \
    "actor_rollout_ref.rollout.seed=$SEED" \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    'trainer.logger=[console,file]' \
    trainer.project_name=verl_ext \
    "trainer.experiment_name=trloo.kernelbench.full.$CELL.seed_$SEED" \
    trainer.resume_mode=auto \
    "trainer.default_local_dir=$RUN/checkpoints" \
    "trainer.validation_data_dir=$RUN/validation" \
    "hydra.run.dir=$RUN/hydra" \
    trainer.total_training_steps=300 \
    "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH=$RUN/metrics.jsonl" \
    "$@"
