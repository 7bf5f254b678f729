#!/usr/bin/env bash
# The search team on a model of 100 thousand parameters that half knows its parts: minutes on a laptop's CPU.
#   pip install 'verl-ext[search]'
#   [SEED=1] bash examples/train_small_search_team_cpu.sh [folder] [further Hydra overrides]
#   python examples/agents/search_team.py [folder]      # what was learnt: searching, reading, the answer
set -euo pipefail

OUT=${1:-runs/small_search_team}
shift || true
python "$(dirname "$0")/agents/small_searchers.py" "$OUT" --seed "${SEED:-0}"

VERL_FILE_LOGGER_PATH="$OUT/metrics.jsonl" python -m verl.trainer.main_ppo '+recipe=[dr_mas,cpu]' \
    ${SEED:+data.seed="$SEED"} \
    data.train_files="$OUT/train.parquet" \
    data.val_files="$OUT/val.parquet" \
    actor_rollout_ref.model.path="$OUT/model" \
    reward.custom_reward_function.path=pkg://verl_ext.rewards.qa \
    reward.custom_reward_function.name=compute_score \
    actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_orchestra \
    +verl_ext.orchestra.name=search \
    +verl_ext.orchestra.retriever.kind=bm25 \
    +verl_ext.orchestra.retriever.corpus="$OUT/corpus.jsonl" \
    +verl_ext.orchestra.options.max_steps=3 \
    +verl_ext.orchestra.options.top_k=1 \
    +verl_ext.orchestra.agents.verifier.role='Enough?' \
    +verl_ext.orchestra.agents.searcher.role='Search.' \
    +verl_ext.orchestra.agents.searcher.examples="$OUT/examples.json" \
    +verl_ext.orchestra.agents.answerer.role='Answer.' \
    algorithm.dr_mas.invalid_action_penalty_coef=0.01 \
    verl_ext.updates_per_batch=2 \
    data.train_batch_size=8 \
    data.max_prompt_length=160 \
    data.max_response_length=8 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.val_kwargs.n=8 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.optim.lr=3e-4 \
    trainer.total_training_steps=20 \
    trainer.total_epochs=100 \
    trainer.val_before_train=true \
    trainer.validation_data_dir="$OUT/validation" \
    trainer.test_freq=20 \
    trainer.save_freq=-1 \
    trainer.project_name=verl_ext \
    trainer.experiment_name=small_search_team \
    trainer.default_local_dir="$OUT/checkpoints" \
    verl_ext.rollouts_dir="$OUT/rollouts" \
    hydra.run.dir="$OUT/hydra" \
    "$@"
