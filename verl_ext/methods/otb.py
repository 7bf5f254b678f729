# SPDX-License-Identifier: Apache-2.0
"""OTB: the optimal token baseline (arXiv 2602.07078).

    w_t = 1 - 2 pi_old(y_t) + sum_v pi_old(v)^2              = |onehot(y_t) - pi_old|^2, times rollout weight^2 if given
    W_t = sum over j <= t of w_j m_j                         gradient energy of the prefix
    G_t = sum over j >= t of r_j m_j                         reward-to-go, no discount
    B_t = sum_i G_t^i W_t^i / (sum_i W_t^i + epsilon)        over the samples of the prompt that have a model token at t
    A_t = (G_t - B_t) m_t

The batch is worked on in blocks of whole groups that fit into the cache, so the only tensors of the size of the batch
are the two outputs. Inside a block masks are applied by multiplication, many times faster than selection; NaN in
padding then shows up in the group sums, and that block is done again by selection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from verl_ext.methods.groups import Column
from verl_ext.methods.returns import token_reward_to_go
from verl_ext.methods.rows import Rows, check_choice, check_range, check_token_field, check_tokens

ALIGNMENTS = ("model_tokens", "column")
BASELINES = ("self_inclusive", "leave_one_out")

#: Elements of a block of groups; a single larger group is worked on in pieces of this many elements.
BLOCK_ELEMENTS = 1 << 18
#: A group of up to this many elements is still one piece, which saves computing its weights twice.
PIECE_ELEMENTS = 1 << 20


class TokenFields(NamedTuple):
    """The [B, T] inputs of the estimator."""

    rewards: torch.Tensor
    mask: torch.Tensor
    old_log_probs: torch.Tensor
    sum_pi_squared: torch.Tensor
    rollout_is_weights: torch.Tensor | None

    def take(self, rows: torch.Tensor | slice) -> TokenFields:
        return TokenFields(*(None if field is None else field[rows] for field in self))


class Piece(NamedTuple):
    """Some rows of a block, in columns."""

    energy: torch.Tensor  #: [R, T] W_t, 0 at columns without a model token
    togo: torch.Tensor  #: [R, T] G_t, 0 at columns without a model token
    alive: torch.Tensor  #: [R, T] 1 where the column holds a model token, in the dtype of energy
    length: torch.Tensor  #: [R] int64 number of model tokens
    slot: torch.Tensor | None  #: [R, T] int64 1 + group * T + position for rows aligned by model tokens; None: columns


def otb_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Column,
    *,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
    valid_row: Column | None = None,
    alignment: str = "model_tokens",
    baseline: str = "self_inclusive",
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    group_by: Sequence[str] = ("index",),
    row_fields: Mapping[str, Column] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token advantages against a baseline a position, weighted by the gradient energy of each sample's prefix.

    Rejected rows (all-zero mask) leave the sums, rows without tokens are skipped, and a group with one row left keeps
    A = G. Identical rewards leave A = G epsilon / (W + epsilon): rounding size, as nothing divides by a spread here.

    Args:
        token_level_rewards: [B, T] float; rewards on model tokens.
        response_mask: [B, T] of 0 and 1.
        index: [B] prompt uid.
        old_log_probs: [B, T] log-probability of the sampled token under the policy at batch start.
        sum_pi_squared: [B, T] sum over the vocabulary of the squared probabilities, from float32 logits.
        rollout_is_weights: [B, T] detached importance weights; w_t is multiplied by their square inside the sum.
        valid_row: [B] bool; None means all True. Rows with False are no samples and get 0.
        alignment: "model_tokens": position t is the t-th model token of a row, so tool tokens do not shift the
            comparison. "column": position t is the column, as verl's optimal_token_baseline has it, including its zero
            tail, which starts at the second largest count of model tokens read as a column.
        baseline: "self_inclusive" (released, biased for few samples) or "leave_one_out" (unbiased; no released code):
            B_i = (sum G W - G_i W_i) / (sum W - W_i + epsilon), 0 where no other sample is alive.
        handle_zero_tail: baseline 0 where only the strictly longest row is alive (otherwise A = 0 there); a
            leave-one-out baseline is 0 there by itself.
        epsilon: added to the sum of weights; 1e-8 released.
        group_by: row fields that make a group.
        row_fields: further columns for group_by.

    Returns:
        (advantages, returns): A and G, both [B, T] float32, 0 at masked positions.

    Raises:
        RowFieldError: a needed column is missing or cannot be used.
        ValueError: a shape, an option or a value on a model token (NaN, infinity) is wrong.

    Source: arXiv 2602.07078; verl 0.9.1, verl/trainer/ppo/core_algos.py, (tir_)optimal_token_baseline.
    """
    check_choice("alignment", alignment, ALIGNMENTS)
    check_choice("baseline", baseline, BASELINES)
    check_range("epsilon", epsilon, 0.0)
    batch, length = check_tokens(token_level_rewards, response_mask)
    weights = rollout_is_weights
    fields = TokenFields(
        token_level_rewards.detach(),
        response_mask.detach(),
        check_token_field("old_log_probs", old_log_probs, response_mask).detach(),
        check_token_field("sum_pi_squared", sum_pi_squared, response_mask).detach(),
        None if weights is None else check_token_field("rollout_is_weights", weights, response_mask).detach(),
    )
    rows = Rows(batch, valid_row=valid_row, row_fields=row_fields, index=index)
    # Taking one's own weight out of a sum cancels digits when the others are small, so that path works in float64.
    exact = baseline == "leave_one_out" or torch.float64 in (fields.rewards.dtype, fields.old_log_probs.dtype)
    dtype = torch.float64 if exact else torch.float32
    device = response_mask.device
    make = torch.empty if len(rows.kept) == batch else torch.zeros
    advantages = make(batch, length, dtype=torch.float32, device=device)
    returns = make(batch, length, dtype=torch.float32, device=device)
    if batch == 0 or length == 0 or len(rows.kept) == 0:
        return advantages, returns

    group = rows.keys(group_by)
    order = np.argsort(group, kind="stable")
    for start, stop in _blocks(np.bincount(group), length):
        members = rows.kept[order[start:stop]]
        given = (fields, (advantages, returns), members, group[order[start:stop]], alignment, dtype)
        block = _Block(*given)
        if not block.finite():
            block = _Block(*given, select=True)
            if not block.finite():
                _raise_not_finite(fields, rows, order[start:stop])
        own = baseline == "self_inclusive"
        for where, value, togo in block.self_inclusive(epsilon, handle_zero_tail) if own else block.others(epsilon):
            _store(advantages, where, value)
            _store(returns, where, togo)
    return advantages, returns


def _store(out: torch.Tensor, where: torch.Tensor | slice, value: torch.Tensor) -> None:
    """Write the rows, unless they were computed in place."""
    if not isinstance(where, slice) or out[where].data_ptr() != value.data_ptr():
        out[where] = value.to(out.dtype)


def _blocks(counts: np.ndarray, length: int) -> Iterator[tuple[int, int]]:
    """Ranges of the rows, sorted by group, that hold whole groups and about BLOCK_ELEMENTS elements."""
    ends = np.cumsum(counts)
    budget = max(1, BLOCK_ELEMENTS // length)
    start = 0
    while start < ends[-1]:
        full = int(np.searchsorted(ends, start + budget, side="right"))
        first = int(np.searchsorted(ends, start, side="right"))
        stop = int(ends[max(full - 1, first)])
        yield start, stop
        start = stop


def _where(rows: np.ndarray, device: torch.device) -> torch.Tensor | slice:
    """A slice when the rows are consecutive (no copy), else their positions."""
    if int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool((np.diff(rows) == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)


class _Block:
    """Whole groups of rows with their sums of G W and W.

    Args:
        fields: inputs of the batch.
        outputs: advantages and returns of the batch, which serve as buffers where rows and dtype allow.
        members: [R] row numbers, sorted by group.
        group: [R] int64 group ids of the members, consecutive.
        alignment: "model_tokens" or "column".
        dtype: of the computation.
        select: drop masked positions by selection instead of multiplication.
    """

    def __init__(
        self,
        fields: TokenFields,
        outputs: tuple[torch.Tensor, torch.Tensor],
        members: np.ndarray,
        group: np.ndarray,
        alignment: str,
        dtype: torch.dtype,
        select: bool = False,
    ):
        self.fields, self.outputs, self.members = fields, outputs, members
        self.alignment, self.dtype, self.select = alignment, dtype, select
        self.group = group - group[0]
        self.number = int(self.group[-1]) + 1
        self.length = int(fields.mask.shape[1])
        rows = len(members)
        step = rows if rows * self.length <= PIECE_ELEMENTS else max(1, BLOCK_ELEMENTS // self.length)
        self.spans = [slice(at, min(at + step, rows)) for at in range(0, rows, step)]
        size = rows // self.number
        #: rows of a group when all groups have as many and the block is one piece, else 0
        self.size = size if len(self.spans) == 1 and bool((self.group == np.arange(rows) // size).all()) else 0
        self.known: tuple[Piece, torch.Tensor] | None = None
        self._accumulate()

    def _accumulate(self) -> None:
        lengths = []
        sums: list[torch.Tensor] | None = None
        for span in self.spans:
            piece, product = self._prepare(span)
            lengths.append(piece.length)
            weight = piece.energy
            if len(self.spans) == 1:
                self.known = (piece, product)
            if self.size and piece.slot is None:
                view = (self.number, self.size, self.length)
                self.numerator, self.denominator = product.view(view).sum(1), weight.view(view).sum(1)
                continue
            if sums is None:
                sums = [weight.new_zeros(1 + self.number * self.length) for _ in range(2)]
                self.numerator, self.denominator = (x[1:].view(self.number, self.length) for x in sums)
            if piece.slot is None:
                ids = torch.from_numpy(self.group[span]).to(weight.device)
                self.numerator.index_add_(0, ids, product)
                self.denominator.index_add_(0, ids, weight)
            else:
                sums[0].scatter_add_(0, piece.slot.view(-1), product.view(-1))
                sums[1].scatter_add_(0, piece.slot.view(-1), weight.view(-1))
        self.lengths = torch.cat(lengths).cpu().numpy()

    def finite(self) -> bool:
        """Whether the sums are finite: no NaN or infinity came in."""
        return bool(torch.isfinite((self.numerator + self.denominator).sum()))

    def self_inclusive(
        self, epsilon: float, handle_zero_tail: bool
    ) -> Iterator[tuple[torch.Tensor | slice, torch.Tensor, torch.Tensor]]:
        """Rows, advantages and returns, piece by piece, with the released baseline."""
        baseline = self.numerator.div_(self.denominator.add_(epsilon))
        nonempty = np.bincount(self.group, weights=self.lengths > 0, minlength=self.number)
        if (nonempty <= 1).any():
            baseline[torch.from_numpy(nonempty <= 1).to(baseline.device)] = 0.0
        if epsilon == 0:
            baseline.nan_to_num_(nan=0.0)  # no weight at all
        cut = _zero_tail(self.lengths, self.group, self.length) if handle_zero_tail else None
        if cut is not None and self.alignment == "model_tokens":
            # Beyond the second longest row only the longest one reads the baseline.
            reach = np.full(self.number, self.length)
            np.minimum.at(reach, self.group, cut)
            position = torch.arange(self.length, device=baseline.device)
            baseline.mul_(position < torch.from_numpy(reach).to(baseline.device).unsqueeze(-1))
        for span, piece, product in self._pieces():
            if self.size and piece.slot is None:
                view = (self.number, self.size, self.length)
                torch.sub(piece.togo.view(view), baseline.unsqueeze(1), out=product.view(view))
                value = product
            else:
                value = torch.sub(piece.togo, self._at_tokens(baseline, piece, span), out=product)
            value.mul_(piece.alive)
            if cut is not None and self.alignment == "column":
                _apply_zero_tail(value, piece, cut[span])
            yield _where(self.members[span], value.device), value, piece.togo

    def others(self, epsilon: float) -> Iterator[tuple[torch.Tensor | slice, torch.Tensor, torch.Tensor]]:
        """Rows, advantages and returns, piece by piece, with the leave-one-out baseline."""
        for span, piece, product in self._pieces():
            rest = self._at_tokens(self.numerator, piece, span).sub_(product)
            weight = self._at_tokens(self.denominator, piece, span).sub_(piece.energy).clamp_(min=0.0).add_(epsilon)
            baseline = rest.div_(weight).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            value = torch.sub(piece.togo, baseline, out=product).mul_(piece.alive)
            yield _where(self.members[span], value.device), value, piece.togo

    def _pieces(self) -> Iterator[tuple[slice, Piece, torch.Tensor]]:
        """The pieces again, with masked energies and a buffer that holds G W."""
        for span in self.spans:
            if self.known is not None:
                yield span, *self.known
            else:
                yield span, *self._prepare(span)

    def _prepare(self, span: slice) -> tuple[Piece, torch.Tensor]:
        """The piece and G W, which lies in the buffer that the advantages go to."""
        where = _where(self.members[span], self.fields.mask.device)
        fields = self.fields.take(where)
        in_place = isinstance(where, slice) and self.dtype == torch.float32
        product, togo = (out[where] if in_place else None for out in self.outputs)
        alive = fields.mask.to(self.dtype)
        length = alive.sum(-1).long()
        # In a prefix the mask never rises from one column to the next; a float pass is cheaper than one over booleans.
        prefix = self.length < 2 or bool((alive[:, 1:] - alive[:, :-1]).amax() <= 0)
        slot = None
        if self.alignment == "model_tokens" and not prefix:
            slot = alive.cumsum(-1).long()
            slot += torch.from_numpy(self.group[span] * self.length).to(slot.device).unsqueeze(-1)

        weight = torch.exp(fields.old_log_probs.to(self.dtype))
        weight.mul_(-2.0).add_(fields.sum_pi_squared).add_(1.0).clamp_(min=0.0)
        if fields.rollout_is_weights is not None:
            weight.mul_(fields.rollout_is_weights).mul_(fields.rollout_is_weights)
        if self.select:
            weight = torch.where(fields.mask.to(torch.bool), weight, 0.0)
        elif not prefix:
            weight.mul_(alive)  # a prefix needs no masking before the sum
        energy = torch.cumsum(weight, -1, out=weight)
        energy.mul_(alive)
        piece = Piece(energy, self._reward_to_go(fields, alive, length, prefix, togo), alive, length, slot)
        return piece, torch.mul(piece.togo, energy, out=product)

    def _reward_to_go(
        self, fields: TokenFields, alive: torch.Tensor, length: torch.Tensor, prefix: bool, out: torch.Tensor | None
    ) -> torch.Tensor:
        """G_t; a row whose only reward sits on its last model token needs no sum."""
        rewards = fields.rewards.to(self.dtype)
        if prefix:
            last = rewards.gather(1, (length - 1).clamp(min=0).unsqueeze(-1))
            if bool((rewards.abs().sum(-1, keepdim=True) == last.abs()).all()):
                return torch.mul(alive, last, out=out)
        return token_reward_to_go(rewards, fields.mask).mul_(alive)

    def _at_tokens(self, sums: torch.Tensor, piece: Piece, span: slice) -> torch.Tensor:
        """Group values [g, T] at the positions of each row, [R, T]; anything at columns without a model token."""
        if piece.slot is None:
            return sums.index_select(0, torch.from_numpy(self.group[span]).to(sums.device))
        flat = torch.cat([sums.new_zeros(1), sums.reshape(-1)])
        return flat.index_select(0, piece.slot.view(-1)).view(piece.slot.shape)


def _zero_tail(lengths: np.ndarray, ids: np.ndarray, length: int) -> np.ndarray:
    """Position from which the baseline of a row is 0, [R]: the second largest length for a strictly longest row."""
    order = np.lexsort((lengths, ids))
    top = np.flatnonzero(np.append(ids[order][1:] != ids[order][:-1], True))
    second = np.maximum(top - 1, 0)
    longest = (top > 0) & (ids[order[second]] == ids[order[top]]) & (lengths[order[top]] > lengths[order[second]])
    cut = np.full(len(lengths), length, dtype=np.int64)
    cut[order[top[longest]]] = lengths[order[second[longest]]]
    return cut


def _apply_zero_tail(value: torch.Tensor, piece: Piece, cut: np.ndarray) -> None:
    """A = G from column `cut` of a row on."""
    rows = np.flatnonzero(cut < value.shape[1])
    if rows.size:
        at = torch.from_numpy(rows).to(value.device)
        first = torch.from_numpy(cut[rows]).to(value.device).unsqueeze(-1)
        value[at] = torch.where(torch.arange(value.shape[1], device=value.device) >= first, piece.togo[at], value[at])


def _raise_not_finite(fields: TokenFields, rows: Rows, members: np.ndarray) -> None:
    """Name the first field and row, of these positions among the valid rows, that hold NaN or infinity on a token."""
    for row in np.sort(members).tolist():
        tokens = fields.mask[rows.kept[row]].to(torch.bool)
        for name, field in zip(fields._fields, fields, strict=True):
            if field is not None and not bool(torch.isfinite(field[rows.kept[row]][tokens]).all()):
                name = "token_level_rewards" if name == "rewards" else name
                raise ValueError(f"{name} holds NaN or infinity on a model token of {rows.where(row)}")
    raise ValueError("the optimal token baseline overflows: rewards or importance weights are too large")
