# SPDX-License-Identifier: Apache-2.0
"""Sequences and turns.

A **sequence** is what verl stores and trains: a prompt, a response, a mask that is 1 on tokens of the model. A **turn**
is one model call, and what estimators, modifiers, rejection rules, metrics, records and transcripts see. A
sequence holds one turn, or several: of a loop whose outputs were merged (`verl_ext.rollout.shared.merge`), or of one
like verl's ``tool_agent`` that returns a single output with the answers of tools in it, whose turns are the runs of 1
in the mask. `lay_out` says where they lie, `Turns` takes columns from sequences to turns and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

TURNS = "turns"
"""Of a merged sequence's ``extra_fields``: ``spans`` [[start, end), ...] in tokens of the response, ``places`` of the
turns among the loop's outputs, and ``own``, what each turn has said that not all have said alike. A loop with one
output has it from `verl_ext.rollout.shared.one_output`."""

PER_TOKEN = ("sampler_log_probs", "sampler_ids")
"""Of ``extra_fields``: one entry a token of the model; the engine reads them of the sequence."""


@dataclass(frozen=True)
class Turns:
    """Where V turns lie in B sequences of at most T tokens; without `sequence` each sequence is one turn.

    Attributes:
        sequence, start, end: [V] int64, the turn's sequence and its tokens [start, end) there.
        shape: (B, T).
    """

    sequence: torch.Tensor | None = None
    start: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    end: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    shape: tuple[int, int] = (0, 0)

    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Places [V, W] in the response, and which of them are the turn's; W is the longest turn."""
        length = self.end - self.start
        place = torch.arange(max(int(length.max()), 1), device=length.device)
        return self.start[:, None] + place, place < length[:, None]

    def unpack(self, column: torch.Tensor) -> torch.Tensor:
        """A column [B, S] of sequences as one of turns, [V, W], 0 after each turn's end. Keeps gradients."""
        if self.sequence is None:
            return column
        place, own = self.places()
        found = column[self.sequence[:, None], place.clamp(max=column.shape[1] - 1)]
        return torch.where(
            own & (place < column.shape[1]), found, torch.zeros((), dtype=column.dtype, device=column.device)
        )

    def pack(self, column: torch.Tensor) -> torch.Tensor:
        """A column [V, W] of turns as one of sequences, [B, T], 0 between the turns. Keeps gradients."""
        if self.sequence is None:
            return column
        place, own = self.places()
        row = self.sequence[:, None].expand(place.shape)
        whole = torch.zeros(self.shape, dtype=column.dtype, device=column.device)
        return whole.index_put((row[own], place[own]), column[:, : own.shape[1]][own])

    def rewards(self, scores: torch.Tensor) -> torch.Tensor:
        """The outcome of each sequence, the sum of its `scores` [B, T], on the last token of each of its turns [V, W],
        as with a sequence a call. A sequence of one turn keeps its own."""
        if self.sequence is None:
            return scores
        own = self.unpack(scores)
        outcome = torch.zeros_like(own)
        last = (self.end - self.start - 1).clamp(min=0)
        outcome[torch.arange(len(last)), last] = scores.sum(-1)[self.sequence]
        several = torch.bincount(self.sequence, minlength=len(scores))[self.sequence] > 1
        return torch.where(several[:, None], outcome, own)

    def texts(self, prompts: Sequence[Any], responses: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Prompt and answer of each turn, [V] tensors of ids, from those of the sequences."""
        if self.sequence is None:
            return list(prompts), list(responses)
        where = torch.stack([self.sequence, self.start, self.end], dim=-1).tolist()
        asked = [torch.cat([prompts[row], responses[row][:start]]) for row, start, _ in where]
        return asked, [responses[row][start:end] for row, start, end in where]

    def numbers(self) -> torch.Tensor:
        """[B, T] int64: the number of its turn in the batch, from 1, at each token; 0 between."""
        _, own = self.places()
        return self.pack(own * torch.arange(1, len(own) + 1)[:, None])

    @classmethod
    def of_numbers(cls, numbers: torch.Tensor) -> Turns:
        """The turns that have a token, from `numbers` [B, T]; of some rows of them too."""
        flat = torch.nn.functional.pad(numbers, (1, 1)).flatten()
        edge = flat[1:] != flat[:-1]
        begins = (edge & (flat[1:] > 0)).nonzero()[:, 0]
        ends = (edge & (flat[:-1] > 0)).nonzero()[:, 0]
        if not len(begins):
            return cls()
        width = numbers.shape[1] + 2
        return cls(begins // width, begins % width, ends % width, tuple(numbers.shape))


@dataclass
class Layout:
    """The turns of a batch: where they are, and of each its storage key (as if verl had stored the turn), the tags of
    its sequence, and what the agent loop said of it."""

    turns: Turns
    keys: list[str]
    tags: list[Mapping[str, Any]]
    said: Sequence[Mapping[str, Any]]


def lay_out(keys: Sequence[str], tags: Sequence[Mapping[str, Any]], said: Sequence[Mapping[str, Any]]) -> Layout:
    """The turns of the sequences of a batch, sequence by sequence.

    Args:
        keys, tags: verl's, one a sequence; ``response_len`` of the tags is read.
        said: ``extra_fields`` of each.
    """
    if not any(TURNS in one for one in said):
        return Layout(Turns(), list(keys), list(tags), list(said))
    rows: list[tuple[int, str, Sequence[int], Mapping[str, Any]]] = []
    for number, (key, tag, one) in enumerate(zip(keys, tags, said, strict=True)):
        whole = (0, int(tag["response_len"]))
        if TURNS not in one:
            rows.append((number, key, whole, one))
            continue
        spans, places, own = (one[TURNS][name] for name in ("spans", "places", "own"))
        if tag.get("is_padding", False):  # verl's copy of the first sequence, with a response of its own
            spans, places = [whole], places[:1]
        shared = set(one) - {TURNS, *PER_TOKEN, *(name for each in own for name in each)}
        for place, span, each in zip(places, spans, own, strict=False):
            fields = {**{name: one[name] for name in shared}, **each}
            rows.append((number, f"{key.rpartition('_')[0]}_{place}", span, fields))
    numbers, names, spans, fields = zip(*rows, strict=True)
    start, end = torch.tensor(spans, dtype=torch.int64).unbind(-1)
    shape = len(keys), max(int(tag["response_len"]) for tag in tags)
    turns = Turns(torch.tensor(numbers), start, end, shape)
    return Layout(turns, list(names), [tags[number] for number in numbers], list(fields))


def unpacked(data: Any, turns: Turns) -> Any:
    """verl's DataProto of the sequences, of [B, T] columns, as one of their turns; itself where each is one turn. The
    outcome of a sequence is on the last token of each of its turns, beside the KL in the reward."""
    if turns.sequence is None:
        return data
    from tensordict import TensorDict

    batch = {name: turns.unpack(column) for name, column in data.batch.items()}
    before, scores = batch["token_level_scores"], turns.rewards(data.batch["token_level_scores"])
    rewards = batch["token_level_rewards"]
    # No arithmetic where nothing changes, which would round.
    batch["token_level_rewards"] = torch.where(before == scores, rewards, rewards - before + scores)
    batch["token_level_scores"] = batch["rm_scores"] = scores
    rows = turns.sequence.numpy()
    return type(data)(
        batch=TensorDict(batch, batch_size=len(rows)),
        non_tensor_batch={name: column[rows] for name, column in data.non_tensor_batch.items()},
        meta_info=dict(data.meta_info),
    )


def packed(rows: Any, data: Any, turns: Turns) -> Any:
    """`data` of the sequences with what has been computed on their turns, `rows`."""
    for name in ("advantages", "returns", "response_mask") if turns.sequence is not None else ():
        data.batch[name] = turns.pack(rows.batch[name])
    return rows if turns.sequence is None else data
