#!/usr/bin/env bash
# Dr. MAS, verifier, searcher and answerer on open-domain questions (arXiv 2602.08847), at the paper's scale, with
# verl's vLLM rollout.
# Made from recipe/dr_mas/search.yaml by `python -m verl_ext.reproduce.scripts --write examples/reproduce`. Copy it to
# change it; the file itself is made anew.
#
# bash dr_mas_search.sh CELL [SEED] [KEY=VALUE...]
# One cell and seed; `verl-ext reproduce run dr_mas/search --cell CELL --seeds SEED` makes the same run and keeps the
# record from which `collect` makes the table. The same command goes on with a killed run.
#
# Claim: Normalising each agent's advantages by its own rewards beats one global baseline for a team of three that
# searches.
# Cost: 2 cells x 3 seeds on 1 node with 8 GPUs (H100 80 GB; abstract-or-blog); 26 hours a cell and seed
# (abstract-or-blog; README: about 26 hours for three models with separate weights); 1248 GPU-hours in all.
# Packages: vllm.
# Left open by what was read:
# - The published runs give each of the three agents weights of its own; verl trains one policy, so here all agents
#   share one model.
# - The paper's body was not read; the abstract gives differences to GRPO only, and not the number of seeds.
# - The seven test sets are not named in what was read; here they are the seven of Search-R1, each weighing the
#   same.
# - How many test questions are sampled 16 times is not stated; here it is all of them. data.val_max_samples bounds
#   them.
# - The model is called Qwen2.5-7B; whether base or instruct is not stated. Here it is the base model.
# - The released code takes a verdict that cannot be parsed for yes; the runs here do the same.
# - The prompts of the published agents are not repeated here; the agents use this package's own.
set -euo pipefail

usage='usage: bash dr_mas_search.sh CELL [SEED] [KEY=VALUE...]   CELL is grpo|dr_mas'
CELL=${1:?"$usage"}
SEED=${2:-0}
shift $(($# < 2 ? $# : 2))

# What you have to bring.
# RETRIEVER_URL: address of a retrieval server with Search-R1's interface, such as http://host:8000/retrieve, that
# serves E5-base-v2 over the Wikipedia dump of 2018 (wiki-18)
: "${RETRIEVER_URL:?}"
export RETRIEVER_URL

# Prepared data (verl-ext reproduce prepare dr_mas/search) and the folder of this run.
DATA=${DATA:-${VERL_EXT_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/verl_ext}/data}
RUN=${OUT:-$PWD/runs/scripts}/dr_mas.search/full/$CELL/seed_$SEED
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
    "data.train_files=[$DATA/nq_train.parquet,$DATA/hotpotqa_train.parquet]" \
    "data.val_files=[$DATA/nq.parquet,$DATA/triviaqa.parquet,$DATA/popqa.parquet,$DATA/hotpotqa.parquet,$DATA/wiki2.parquet,$DATA/musique.parquet,$DATA/bamboogle.parquet]" \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B \
    data.train_batch_size=128 \
    actor_rollout_ref.rollout.n=5 \
    data.max_prompt_length=4096 \
    data.max_response_length=800 \
    actor_rollout_ref.actor.optim.lr=1e-06 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    verl_ext.updates_per_batch=5 \
    actor_rollout_ref.actor.use_kl_loss=false \
    algorithm.use_kl_in_reward=false \
    actor_rollout_ref.actor.entropy_coeff=0.001 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.95 \
    actor_rollout_ref.rollout.val_kwargs.n=16 \
    trainer.total_epochs=1 \
    algorithm.norm_adv_by_std_in_grpo=true \
    algorithm.dr_mas.invalid_action_penalty_coef=0.01 \
    actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_orchestra \
    +verl_ext.orchestra.name=search \
    +verl_ext.orchestra.options.max_steps=4 \
    +verl_ext.orchestra.options.top_k=3 \
    +verl_ext.orchestra.options.unparsable_verdict=yes \
    +verl_ext.orchestra.retriever.kind=http \
    "+verl_ext.orchestra.retriever.url=$RETRIEVER_URL" \
    reward.custom_reward_function.path=pkg://verl_ext.rewards.qa \
    reward.custom_reward_function.name=compute_score \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    trainer.test_freq=50 \
    trainer.save_freq=50 \
    "data.seed=$SEED" \
    "actor_rollout_ref.rollout.seed=$SEED" \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    'trainer.logger=[console,file]' \
    trainer.project_name=verl_ext \
    "trainer.experiment_name=dr_mas.search.full.$CELL.seed_$SEED" \
    trainer.resume_mode=auto \
    "trainer.default_local_dir=$RUN/checkpoints" \
    "trainer.validation_data_dir=$RUN/validation" \
    "hydra.run.dir=$RUN/hydra" \
    "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH=$RUN/metrics.jsonl" \
    "$@"
