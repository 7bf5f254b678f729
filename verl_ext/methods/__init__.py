# SPDX-License-Identifier: Apache-2.0
"""The methods as their papers write them: functions of tensors and columns that know nothing of verl.

A method is ``<name>_advantage(token_level_rewards, response_mask, index, *, ...) -> Advantage`` in a file of its own.
What tensors and columns mean is the same everywhere and said here; a method's docstring has its formula and options:

    token_level_rewards: [B, T] float; the score of a turn is the sum of its tokens' rewards, masked ones too
    response_mask: [B, T] of 0 and 1, the model's tokens
    index: [B] uid of the prompt
    traj_uid: [B] uid of the trajectory; may repeat in another prompt
    turn_index: [B] chronological place of the turn in its trajectory, all agents counted
    agent_id: [B] the agent that produced the turn
    anchor_obs: [B] raw observation before the turn, without history or template
    turn_reward: [B] reward of the turn alone
    is_action_valid: [B] bool; None: every action was valid
    valid_row: [B] bool; None: all True. Turns with False are no samples: they enter no statistic and get 0
    row_fields: further columns by name
    group_by: columns that make a group: turns that agree in all of them are compared

A column has one entry a turn (an array, a tensor or a list), compared by value. A rejected turn (its mask is all 0, its
`valid_row` True) stays a sample. Statistics are float64; a group whose rewards are equal up to rounding gets exactly 0.
A result (`Advantage`) unpacks as advantages and returns, [B, T] float32 and 0 at masked positions; they are one tensor
where all tokens of a turn share a value.

What cannot be used raises an error that names it, its turn and the remedy: `RowFieldError` for a column, `OptionError`
for an option, ValueError for a shape or a reward (NaN, infinity, a result beyond float32). All are ValueErrors.

By kind, one line each; a file each, where no other file is named:

    estimators
        `trloo`: the discounted return of a turn, less the mean of the other trajectories'
        `dr_mas`: rewards normalised agent by agent
        `hgpo`, `gigpo`: groups of equal histories, of equal observations
        `otb`: the optimal token baseline
        `maxrl`: the likelihood of a right answer, in place of its probability
    modifiers of any estimator's advantages
        `empg`: by the entropy of a turn
    losses
        `kpo`: a Kalman filter of the token log ratio
        `dvp`: the policy restricted to its safe vocabulary
        `divergence_augmented`: a penalty on the divergence from the last policy
        `hybrid_imitation`: stay near a teacher and collect reward
    rules that leave turns out of the loss (`rejection.py`)
        `mrs`, `ser`, `trm`, `ln_trm`: trainer and sampler disagree
        `simpletir`: a turn neither calls a tool nor answers
        `variance_filter`: rewards of a prompt barely differ
    rewards (`kernel_reward.py`)
        `kernel_reward`, `profiling_reward`, and the rule `prs`, which keeps kernels by their profile
    schedules
        `length_lr`: a learning rate that falls once responses grow suddenly

One more: its file here, its line where verl's side keeps the kind (estimators in `integration/estimators.py`, losses in
`integration/losses.py`, the rest as a part in `integration/parts`), `recipe/<name>.yaml`, `recipe/<name>/README.md`.
CONTRIBUTING.md says it step by step.

The parts that methods share: `groups` (keys by value, statistics of groups), `returns`, `observations` (turns as
steps), `rows` (columns, checks, the result) and `options` (what a signature says). `dvp` and the exact divergences
stand on the pass over the logits, `logits/`, which computes by plain torch or by kernels for CUDA tensors.
"""
