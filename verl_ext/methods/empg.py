# SPDX-License-Identifier: Apache-2.0
"""EMPG: entropy-modulated policy gradient (arXiv 2509.09265), a modifier of any estimator's advantages.

    H_i  = mean over the turn's model tokens of the entropy of the old policy
    h_i  = (H_i - min H) / (max H - min H + 1e-8)                 over all valid turns; equal up to rounding: 0
    g_i  = exp(-k h_i) / (mean exp(-k h) + 1e-8)                  confident steps weigh more
    f_i  = exp(-k_f h_i)
    A'_i = A_i g_i + zeta f_next(i)                               next: same trajectory, turn_index + 1; none: no bonus
    A_i <- A'_i - mean over valid turns of A'                      no division by a deviation

There is no code of the authors; the vectors are from WillDreamer/ARLArena `core_algos.py`, a re-implementation.
"""

from __future__ import annotations

import numpy as np
import torch

from verl_ext.methods.groups import ZERO_VARIANCE_RTOL, Column
from verl_ext.methods.options import NotNegative, checked
from verl_ext.methods.rows import Rows, check_token_field, check_tokens

EPSILON = 1e-8


@checked
def empg(
    advantages: torch.Tensor,
    token_entropy: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    traj_uid: Column | None = None,
    turn_index: Column | None = None,
    index: Column | None = None,
    valid_row: Column | None = None,
    k: NotNegative = 1.0,
    k_f: NotNegative = 1.0,
    zeta: NotNegative = 0.1,
) -> torch.Tensor:
    """Scale the advantages of each step by the model's confidence and reward reaching a confident next step.

    Args:
        advantages: [B, T] float, of any estimator. Where they differ within a turn, A_i in the mean is the turn's mean.
        token_entropy: [B, T] float, entropy of the old policy over the whole vocabulary at each position, in nats.
        response_mask: [B, T] of 0 and 1.
        traj_uid, turn_index: [B] trajectory and int step in it; without both each turn is a trajectory of one step.
        index: [B] prompt uid, where two prompts may have trajectories of one name.
        valid_row: [B] bool; turns with False, like turns without model tokens, are in no statistic and get 0.
        k: how much confidence scales (0: not at all). Published: 1.
        k_f: how fast the bonus falls with the next step's entropy. Published: 1.
        zeta: size of the bonus. Published listing: 0.1; ARLArena: 0.05.

    Returns:
        [B, T] float32, 0 where there is no model token.

    Raises:
        ValueError: an option is negative, a shape is wrong, or a value at a model token is not finite.
    """
    batch = check_tokens(advantages, response_mask)
    check_token_field("token_entropy", token_entropy, response_mask)
    index = np.zeros(batch, dtype=np.int64) if index is None else index
    rows = Rows(batch, index=index, traj_uid=traj_uid, turn_index=turn_index, valid_row=valid_row)
    token = response_mask.bool()
    sample = torch.zeros(batch, dtype=torch.bool)
    sample[torch.from_numpy(rows.kept)] = True
    sample &= token.any(-1).cpu()
    used = sample.nonzero().squeeze(-1).to(token.device)
    result = torch.zeros(response_mask.shape, dtype=torch.float32, device=token.device)
    if len(used) == 0:
        return result

    token = token[used]
    length = token.sum(-1)
    given = _finite("advantages", advantages[used], token)
    entropy = _finite("token_entropy", token_entropy[used], token).sum(-1) / length  # H_i
    low, high = entropy.min(), entropy.max()
    equal = high - low <= ZERO_VARIANCE_RTOL * entropy.abs().max().clamp(min=1.0)
    scaled = torch.where(equal, 0.0, (entropy - low) / (high - low + EPSILON))  # h_i
    confident = torch.exp(-k * scaled)
    gain = confident / (confident.mean() + EPSILON)  # g_i
    clarity = torch.exp(-k_f * scaled)  # f_i
    following = _next_step(rows, sample).to(token.device)
    bonus = torch.where(following >= 0, clarity[following.clamp(min=0)], 0.0)
    modulated = given * gain[:, None] + zeta * bonus[:, None]  # A'_i
    row_mean = torch.where(token, modulated, 0.0).sum(-1) / length
    result[used] = torch.where(token, modulated - row_mean.mean(), 0.0).float()
    return result


def _next_step(rows: Rows, sample: torch.Tensor) -> torch.Tensor:
    """For each turn in `sample` the position, among them, of the next step of its trajectory; -1: there is none."""
    chosen = sample.numpy()[rows.kept]
    trajectory, turn = rows.turns()
    trajectory, turn = trajectory[chosen], turn[chosen]
    order = np.lexsort((turn, trajectory))
    follows = (np.diff(trajectory[order]) == 0) & (np.diff(turn[order]) == 1)
    following = np.full(len(order), -1)
    following[order[:-1][follows]] = order[1:][follows]
    return torch.from_numpy(following)


def _finite(name: str, values: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Values of model tokens in float64, 0 elsewhere; ValueError if one is not finite."""
    values = torch.where(token, values.detach().double(), 0.0)
    if not bool(values.isfinite().all()):
        raise ValueError(f"{name} is not finite at a model token")
    return values
