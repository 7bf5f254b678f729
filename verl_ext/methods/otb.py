# SPDX-License-Identifier: Apache-2.0
"""OTB: the optimal token baseline (arXiv 2602.07078).

    w_t = 1 - 2 pi_old(y_t) + sum_v pi_old(v)^2              = |onehot(y_t) - pi_old|^2, times rollout weight^2 if given
    W_t = sum over j <= t of w_j m_j                         gradient energy of the prefix
    G_t = sum over j >= t of r_j m_j                         reward-to-go, no discount
    B_t = sum_i G_t^i W_t^i / (sum_i W_t^i + epsilon)        over the samples of the prompt that have a model token at t
    A_t = (G_t - B_t) m_t

Everything between the inputs and the two outputs is float64: w_t of a confident token is a difference of numbers near
1, which float32 rounds to about 1e-7, more than epsilon. The batch is worked on in blocks of whole groups in buffers
that are used again and fit into the cache, so the only tensors of the size of the batch are the two outputs. Rows with
tool tokens are first packed to their model tokens. Inside a block masks are applied by multiplication, many times
faster than selection; NaN in padding then shows up in the group sums, and that block is done again by selection.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from verl_ext.methods.groups import Column
from verl_ext.methods.returns import token_reward_to_go
from verl_ext.methods.rows import (
    Rows,
    check_choice,
    check_range,
    check_token_field,
    check_tokens,
    copy_mask,
    empty_tokens,
    has_entries,
)

ALIGNMENTS = ("model_tokens", "column")
BASELINES = ("self_inclusive", "leave_one_out")

#: Elements of a block of groups; a single larger group is worked on in pieces of this many elements.
BLOCK_ELEMENTS = 1 << 18
#: A group of up to this many elements is still one piece, which saves computing its weights twice.
PIECE_ELEMENTS = 1 << 20
#: Multiplications of a matrix product up to which numpy's takes less than half the time of torch's and one thread.
SMALL_PRODUCT = 1 << 18
LOG2_E = 1.0 / math.log(2.0)
#: Whole numbers below these are exact.
EXACT_INTEGERS = {torch.float32: 1 << 24, torch.float64: 1 << 53}


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
    """Some rows of a block, [R, T] float64 in the order in which samples are compared: model tokens or columns."""

    energy: torch.Tensor  #: W_t, 0 where there is no model token
    togo: torch.Tensor  #: G_t, 0 where there is no model token
    product: torch.Tensor  #: G_t W_t, a buffer that the advantages go to
    alive: torch.Tensor  #: 1 where there is a model token
    length: torch.Tensor  #: [R] number of model tokens
    slot: torch.Tensor | None  #: int64 place of every column for packed rows, None: rows are not packed
    mask: torch.Tensor  #: 1 where the column holds a model token


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
    advantages, returns = empty_tokens(fields.mask), empty_tokens(fields.mask)
    if len(rows.kept) < batch:
        advantages.zero_()
        returns.zero_()
    if batch == 0 or length == 0 or len(rows.kept) == 0:
        return advantages, returns

    group = rows.keys(group_by)
    order = np.argsort(group, kind="stable")
    sorted_group, sorted_rows = group[order], rows.kept[order]
    counts = np.bincount(group)
    gaps = np.cumsum(np.diff(sorted_rows, prepend=0) != 1)
    own = baseline == "self_inclusive"
    short_way = own and epsilon > 0 and fields.mask.is_cpu
    buffers = _buffers(fields.mask)
    for start, stop in _blocks(counts, length):
        members = sorted_rows[start:stop]
        sizes = counts[sorted_group[start] : sorted_group[stop - 1] + 1]
        size = int(sizes[0])
        # Groups of one size whose rows follow each other are the usual case.
        if short_way and size > 1 and gaps[start] == gaps[stop - 1] and not np.count_nonzero(sizes != size):
            where = slice(int(members[0]), int(members[-1]) + 1)
            outputs = (advantages[where], returns[where])
            if _plain(fields.take(where), outputs, size, epsilon, handle_zero_tail, buffers):
                continue
        given = (fields, members, sorted_group[start:stop], alignment, buffers)
        block = _Block(*given)
        if not block.finite():
            block = _Block(*given, select=True)
            if not block.finite():
                _raise_not_finite(fields, rows, order[start:stop])
        for where, value, togo in block.self_inclusive(epsilon, handle_zero_tail) if own else block.others(epsilon):
            advantages[where] = value if isinstance(where, slice) else value.float()
            returns[where] = togo if isinstance(where, slice) else togo.float()
    return advantages, returns


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


class _Buffers:
    """[R, T] working tensors by name, kept from block to block: fresh memory costs more than the arithmetic."""

    def __init__(self, device: torch.device):
        self.device = device
        self.known: dict[tuple[str, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}  #: all of it, latest view

    def get(self, name: str, rows: int, length: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """The tensor `name`, uninitialised; it shares memory with earlier ones of that name."""
        flat, view = self.known.get((name, dtype), (None, None))
        if view is not None and view.shape == (rows, length):
            return view
        if flat is None or flat.numel() < rows * length:
            flat = torch.empty(rows * length, dtype=dtype, device=self.device)
        view = flat[: rows * length].view(rows, length)
        self.known[name, dtype] = flat, view
        return view


_kept = threading.local()


def _buffers(mask: torch.Tensor) -> _Buffers:
    """The buffers of this thread, kept from call to call on a CPU: its fresh pages cost as much as the arithmetic."""
    if not mask.is_cpu:
        return _Buffers(mask.device)
    if not hasattr(_kept, "buffers"):
        _kept.buffers = _Buffers(mask.device)
    return _kept.buffers


def _weights(
    fields: TokenFields, weight: torch.Tensor, scratch: torch.Tensor, alive: torch.Tensor, masking: str
) -> torch.Tensor:
    """w_t in `weight`.

    Args:
        fields: rows of the inputs.
        weight, scratch: [R, T] float64, written.
        alive: [R, T] 1 where there is a model token, else 0.
        masking: "none", "multiply" or "select" (drops NaN).
    """
    # On a CPU the float64 exp2 takes half the time of exp.
    torch.exp2(weight.copy_(fields.old_log_probs).mul_(LOG2_E), out=weight)
    torch.add(scratch.copy_(fields.sum_pi_squared), weight, alpha=-2.0, out=weight).add_(1.0).clamp_(min=0.0)
    if fields.rollout_is_weights is not None:
        scratch.copy_(fields.rollout_is_weights)
        weight.mul_(scratch).mul_(scratch)
    if masking == "select":
        weight.copy_(torch.where(alive.to(torch.bool), weight, 0.0))
    elif masking == "multiply":
        weight.mul_(alive if alive.dtype == weight.dtype else scratch.copy_(alive))
    return weight


def _prefix(alive: torch.Tensor, length: np.ndarray, scratch: torch.Tensor) -> bool:
    """Whether the model tokens of every row are its first columns.

    Args:
        alive: [R, T] float, 0 or 1.
        length: [R] its row sums, int64.
        scratch: [R, T] in the dtype of alive, written.
    """
    columns = alive.shape[1]
    if columns * (columns - 1) // 2 < EXACT_INTEGERS[alive.dtype]:
        # Columns 0 to L-1 have the smallest sum that L columns can have, and the sums are exact.
        moment = torch.mv(alive, torch.arange(columns, dtype=alive.dtype, device=alive.device))
        return bool((moment.cpu().numpy() == length * (length - 1) // 2).all())
    # The mask never rises from one column to the next.
    return bool(torch.sub(alive[:, 1:], alive[:, :-1], out=scratch[:, 1:]).amax() <= 0)


def _plain(
    fields: TokenFields,
    outputs: tuple[torch.Tensor, torch.Tensor],
    size: int,
    epsilon: float,
    handle_zero_tail: bool,
    buffers: _Buffers,
) -> bool:
    """The released baseline for the usual block: consecutive rows, groups of one size, no tool tokens, one reward at
    the end of a row. Then G is one number a row, the group sums are a matrix product, and the outputs' own memory
    serves for everything but w. The sum over j <= t of w_j is taken after the sum over the group, which is 8 times
    smaller for 8 samples: a row leaves the sums after its last token by an entry of minus its total there.

    Args:
        fields: the rows of the block, sorted by group, on a CPU.
        outputs: their advantages and returns, written.
        size: rows of each group, at least 2.
        epsilon: above 0; rounding makes weights of groups that have none.

    Returns:
        Whether the block is of that kind and its outputs are valid.
    """
    value, togo = outputs
    rows, columns = value.shape
    number = rows // size
    alive = copy_mask(togo, fields.mask)
    length = alive.sum(-1).numpy().astype(np.int64)
    if not _prefix(alive, length, value):
        return False
    rewards = fields.rewards.float() if fields.rewards.dtype == torch.bfloat16 else fields.rewards
    start = np.arange(0, rows * columns, columns)
    last = rewards.numpy().reshape(-1)[start + np.maximum(length - 1, 0)]
    if not has_entries(rewards, np.count_nonzero(last)):
        return False
    weight, scratch = (buffers.get(name, rows, columns) for name in ("energy", "scratch"))
    # With p = 1 and no sum of squares w is -1, cut off at 0: masked tokens have no weight.
    for target, field in ((weight, fields.old_log_probs), (scratch, fields.sum_pi_squared)):
        if field.dtype == torch.float32:
            target.copy_(torch.mul(field, alive, out=value))
        else:
            target.copy_(field).mul_(alive)
    torch.exp2(weight.mul_(LOG2_E), out=weight)
    torch.add(scratch, weight, alpha=-2.0, out=weight).add_(1.0).clamp_(min=0.0)
    if fields.rollout_is_weights is not None:
        scratch.copy_(fields.rollout_is_weights)
        weight.mul_(scratch).mul_(scratch)

    short = length < columns
    weight.numpy().reshape(-1)[(start + length)[short]] = -weight.sum(-1).numpy()[short]
    coefficients = np.ones((number, 2, size))
    coefficients[:, 0] = last.reshape(number, size)
    sums = buffers.get("sums", 2 * number, columns).view(number, 2, columns)
    if 2 * size * columns <= SMALL_PRODUCT:
        np.matmul(coefficients, weight.numpy().reshape(number, size, columns), out=sums.numpy())
    else:
        torch.bmm(torch.from_numpy(coefficients), weight.view(number, size, columns), out=sums)
    torch.cumsum(sums, -1, out=sums)
    if not math.isfinite(sums.numpy()[:, :, -1].sum()):  # a sum that NaN or infinity comes into stays so
        return False
    rounded, inside = (buffers.get(name, number, columns, torch.float32) for name in ("baseline", "inside"))
    rounded.copy_(sums[:, 0].div_(sums[:, 1].add_(epsilon)))
    reach = np.partition(length.reshape(number, size), size - 2)[:, size - 2 : size - 1]  # 0: only one row has tokens
    if not handle_zero_tail:
        reach = np.where(reach > 0, columns, 0)
    reached = torch.from_numpy(reach.astype(np.float32))
    rounded.mul_(torch.lt(torch.arange(columns, dtype=torch.float32), reached, out=inside))
    column = torch.from_numpy(last.astype(np.float32)[:, None])
    torch.sub(column.view(number, size, 1), rounded.unsqueeze(1), out=value.view(number, size, columns))
    value.mul_(alive)
    togo.mul_(column)
    return True


class _Block:
    """Whole groups of rows with their sums of G W and W.

    Args:
        fields: inputs of the batch.
        members: [R] row numbers, sorted by group.
        group: [R] int64 group ids of the members, consecutive.
        alignment: "model_tokens" or "column".
        buffers: working memory.
        select: drop masked positions by selection instead of multiplication.
    """

    def __init__(
        self,
        fields: TokenFields,
        members: np.ndarray,
        group: np.ndarray,
        alignment: str,
        buffers: _Buffers,
        select: bool = False,
    ):
        self.fields, self.members, self.alignment = fields, members, alignment
        self.buffers, self.select = buffers, select
        self.group = group - group[0]
        self.number = int(self.group[-1]) + 1
        self.length = int(fields.mask.shape[1])
        self.position = torch.arange(self.length, dtype=torch.float64, device=fields.mask.device)
        rows = len(members)
        step = rows if rows * self.length <= PIECE_ELEMENTS else max(1, BLOCK_ELEMENTS // self.length)
        self.spans = [slice(at, min(at + step, rows)) for at in range(0, rows, step)]
        size = rows // self.number
        #: rows of a group when all groups have as many and the block is one piece, else 0
        self.size = size if len(self.spans) == 1 and bool((self.group == np.arange(rows) // size).all()) else 0
        self.known: Piece | None = None
        self._accumulate()

    def _accumulate(self) -> None:
        lengths = []
        if not self.size:
            zeros = torch.zeros(2, self.number, self.length, dtype=torch.float64, device=self.position.device)
            self.numerator, self.denominator = zeros
        for span in self.spans:
            piece = self._prepare(span)
            lengths.append(piece.length)
            if len(self.spans) == 1:
                self.known = piece
            if self.size:
                self.numerator, self.denominator = (self._by_group(x).sum(1) for x in (piece.product, piece.energy))
            else:
                ids = torch.from_numpy(self.group[span]).to(self.position.device)
                self.numerator.index_add_(0, ids, piece.product)
                self.denominator.index_add_(0, ids, piece.energy)
        self.lengths = torch.cat(lengths).cpu().numpy().astype(np.int64)

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
            baseline.mul_(self.position < torch.from_numpy(reach).to(baseline.device).unsqueeze(-1))
        for span, piece in self._pieces():
            if self.size:
                shape = self._by_group(piece.togo)
                value = torch.sub(shape, baseline.unsqueeze(1), out=self._by_group(piece.product)).view_as(piece.togo)
            else:
                value = torch.sub(piece.togo, self._of_rows(baseline, span), out=piece.product)
            value.mul_(piece.alive)
            if cut is not None and self.alignment == "column":
                _apply_zero_tail(value, piece, cut[span])
            yield self._unpacked(span, piece, value)

    def others(self, epsilon: float) -> Iterator[tuple[torch.Tensor | slice, torch.Tensor, torch.Tensor]]:
        """Rows, advantages and returns, piece by piece, with the leave-one-out baseline."""
        for span, piece in self._pieces():
            rest = self._of_rows(self.numerator, span).sub_(piece.product)
            weight = self._of_rows(self.denominator, span).sub_(piece.energy).clamp_(min=0.0).add_(epsilon)
            baseline = rest.div_(weight).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            value = torch.sub(piece.togo, baseline, out=piece.product).mul_(piece.alive)
            yield self._unpacked(span, piece, value)

    def _pieces(self) -> Iterator[tuple[slice, Piece]]:
        """The pieces again."""
        for span in self.spans:
            yield span, self.known if self.known is not None else self._prepare(span)

    def _prepare(self, span: slice) -> Piece:
        rows = span.stop - span.start
        fields = self.fields.take(_where(self.members[span], self.position.device))
        alive, energy, product, scratch = (
            self.buffers.get(name, rows, self.length) for name in ("alive", "energy", "product", "scratch")
        )
        alive.copy_(fields.mask)
        length = alive.sum(-1)
        prefix = _prefix(alive, length.cpu().numpy().astype(np.int64), scratch)
        mask, slot = alive, None
        if self.alignment == "model_tokens" and not prefix:
            fields, slot = self._pack(fields, alive, scratch)
            alive = self.buffers.get("packed", rows, self.length)
            alive.copy_(self.position < length.unsqueeze(-1))
            prefix = True

        # A prefix needs no masking before the sum.
        _weights(fields, energy, scratch, alive, "select" if self.select else "none" if prefix else "multiply")
        torch.cumsum(energy, -1, out=energy).mul_(alive)
        togo = self._reward_to_go(fields.rewards, alive, length, prefix, scratch)
        return Piece(energy, togo, torch.mul(togo, energy, out=product), alive, length, slot, mask)

    def _pack(self, fields: TokenFields, mask: torch.Tensor, scratch: torch.Tensor) -> tuple[TokenFields, torch.Tensor]:
        """The fields with the k-th model token of a row in column k, and the k of every column, [R, T] int64.

        Columns beyond the last model token hold copies of the first column.
        """
        rows, get = len(mask), self.buffers.get
        rank = get("rank", rows, self.length, torch.int64)
        rank.copy_(torch.cumsum(mask, -1, out=scratch).mul_(mask))  # 1, 2, ... at model tokens, 0 elsewhere
        source = get("source", rows, self.length + 1, torch.int64).zero_()
        source.scatter_(1, rank, self.position.long().expand_as(rank))
        packed = {
            name: None
            if field is None
            else torch.gather(field, 1, source[:, 1:], out=get(f"packed {name}", rows, self.length, field.dtype))
            for name, field in fields._asdict().items()
            if name != "mask"
        }
        return fields._replace(**packed), rank.sub_(1).clamp_(min=0)

    def _unpacked(
        self, span: slice, piece: Piece, value: torch.Tensor
    ) -> tuple[torch.Tensor | slice, torch.Tensor, torch.Tensor]:
        """Rows, advantages and returns in the columns of the batch."""
        togo = piece.togo
        if piece.slot is not None:
            # The buffers of W and of the packed mask have served.
            value = torch.gather(value, 1, piece.slot, out=piece.energy).mul_(piece.mask)
            togo = torch.gather(togo, 1, piece.slot, out=piece.alive).mul_(piece.mask)
        return _where(self.members[span], value.device), value, togo

    def _reward_to_go(
        self, rewards: torch.Tensor, alive: torch.Tensor, length: torch.Tensor, prefix: bool, scratch: torch.Tensor
    ) -> torch.Tensor:
        """G_t in a buffer; a row whose only reward sits on its last model token needs no sum."""
        togo = self.buffers.get("togo", *rewards.shape)
        if prefix:
            last = rewards.gather(1, (length.long() - 1).clamp(min=0).unsqueeze(-1)).double()
            if bool((torch.abs(scratch.copy_(rewards), out=scratch).sum(-1, keepdim=True) == last.abs()).all()):
                return torch.mul(alive, last, out=togo)
        return togo.copy_(token_reward_to_go(rewards.double(), alive)).mul_(alive)

    def _by_group(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(self.number, self.size, self.length)

    def _of_rows(self, sums: torch.Tensor, span: slice) -> torch.Tensor:
        """Group values [g, T] of each row, [R, T], a copy."""
        return sums.index_select(0, torch.from_numpy(self.group[span]).to(sums.device))


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
