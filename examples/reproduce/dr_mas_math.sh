#!/usr/bin/env bash
# Dr. MAS, solver and verifier on mathematics (arXiv 2602.08847), at the paper's scale, with verl's vLLM rollout.
# Made from recipe/dr_mas/math.yaml by `python -m verl_ext.reproduce.scripts --write examples/reproduce`. Copy it to
# change it; the file itself is made anew.
#
# bash dr_mas_math.sh CELL [SEED] [KEY=VALUE...]
# One cell and seed; `verl-ext reproduce run dr_mas/math --cell CELL --seeds SEED` makes the same run and keeps the
# record from which `collect` makes the table. The same command goes on with a killed run.
#
# Claim: Normalising each agent's advantages by its own rewards beats one global baseline, and the gradient norm
# spikes less.
# Cost: 2 cells x 3 seeds on 1 node with 4 GPUs (H100 80 GB; abstract-or-blog); 38 hours a cell and seed
# (abstract-or-blog; README: about 38 hours for two models with separate weights); 912 GPU-hours in all.
# Packages: vllm, math-verify.
# Left open by what was read:
# - The published runs give the solver and the verifier weights of their own; verl trains one policy, so here both
#   agents share one model.
# - The paper's body was not read; the abstract gives differences to GRPO only, and not the number of seeds.
# - Which subset of DAPO's mathematics is trained on is not stated; here it is all of the data set's distinct
#   problems.
# - Whether the avg@16 of the abstract is the mean over the six test sets is not stated; here it is, each set
#   weighing the same.
# - The released code takes a verdict that cannot be parsed for approval; the runs here do the same.
# - The three numbers by test set come from one aggregator that does not state the setting.
# - The prompts of the published agents are not repeated here; the agents use this package's own.
set -euo pipefail

usage='usage: bash dr_mas_math.sh CELL [SEED] [KEY=VALUE...]   CELL is grpo|dr_mas'
CELL=${1:?"$usage"}
SEED=${2:-0}
shift $(($# < 2 ? $# : 2))

# Prepared data (verl-ext reproduce prepare dr_mas/math) and the folder of this run.
DATA=${DATA:-${VERL_EXT_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/verl_ext}/data}
RUN=${OUT:-$PWD/runs/scripts}/dr_mas.math/full/$CELL/seed_$SEED
export VERL_FILE_LOGGER_PATH="$RUN/metrics.jsonl"

# What the cells differ in.
case "$CELL" in
grpo)
    # GRPO: over trajectories, all agents together: the released baseline
    cell=(
        algorithm.dr_mas.level=global
    )
    ;;
dr_mas)
    # Dr. MAS
    cell=(
        algorithm.dr_mas.level=agent
    )
    ;;
*)
    echo "$usage" >&2
    exit 2
    ;;
esac

mkdir -p "$RUN"
python -m verl.trainer.main_ppo "${cell[@]}" \
    '+recipe=[dr_mas]' \
    "data.train_files=[$DATA/dapo_math.plain.parquet]" \
    "data.val_files=[$DATA/math500.plain.parquet,$DATA/aime24.plain.parquet,$DATA/aime25.plain.parquet,$DATA/olympiad_bench.plain.parquet,$DATA/amc23.plain.parquet,$DATA/minerva_math.plain.parquet]" \
    actor_rollout_ref.model.path=Qwen/Qwen3-4B \
    data.train_batch_size=32 \
    actor_rollout_ref.rollout.n=8 \
    data.max_prompt_length=8192 \
    data.max_response_length=4096 \
    +data.apply_chat_template_kwargs.enable_thinking=false \
    actor_rollout_ref.actor.optim.lr=1e-06 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    verl_ext.updates_per_batch=1 \
    actor_rollout_ref.actor.use_kl_loss=false \
    algorithm.use_kl_in_reward=false \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.95 \
    actor_rollout_ref.rollout.val_kwargs.n=16 \
    trainer.total_epochs=2 \
    algorithm.norm_adv_by_std_in_grpo=true \
    algorithm.dr_mas.invalid_action_penalty_coef=0.1 \
    actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_orchestra \
    +verl_ext.orchestra.name=solver_verifier \
    +verl_ext.orchestra.options.max_loops=2 \
    +verl_ext.orchestra.options.unparsable_verdict=approve \
    reward.custom_reward_function.path=pkg://verl_ext.rewards.math \
    reward.custom_reward_function.name=compute_score \
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
    trainer.n_gpus_per_node=4 \
    'trainer.logger=[console,file]' \
    trainer.project_name=verl_ext \
    "trainer.experiment_name=dr_mas.math.full.$CELL.seed_$SEED" \
    trainer.resume_mode=auto \
    "trainer.default_local_dir=$RUN/checkpoints" \
    "trainer.validation_data_dir=$RUN/validation" \
    "hydra.run.dir=$RUN/hydra" \
    "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH=$RUN/metrics.jsonl" \
    "$@"
