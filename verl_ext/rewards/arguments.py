# SPDX-License-Identifier: Apache-2.0
"""What reward functions share about the arguments that verl and datasets hand to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VERLS = frozenset({"reward_router_address", "reward_model_tokenizer"})
"""Keyword arguments that verl adds for runs with a reward model."""


def refuse_unknown(given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise for a keyword argument that neither the reward function nor verl knows.

    Raises:
        TypeError: names it and what there is.
    """
    unknown = sorted(set(given) - VERLS)
    if unknown:
        raise TypeError(
            f"reward.custom_reward_function.reward_kwargs.{unknown[0]} is not an option of this reward function; "
            f"known options: {', '.join(known)}"
        )


def references(ground_truth: Any) -> list[str]:
    """Accepted answers of a ground truth: a text or number, a list of them, or Search-R1's ``{"target": ...}``.

    Raises:
        ValueError: there is none.
    """
    if isinstance(ground_truth, Mapping):
        if "target" not in ground_truth:
            raise ValueError(f"ground truth {dict(ground_truth)!r:.200} has no key 'target'")
        ground_truth = ground_truth["target"]
    if hasattr(ground_truth, "tolist"):  # a column of a parquet file comes as an array
        ground_truth = ground_truth.tolist()
    accepted = list(ground_truth) if isinstance(ground_truth, list | tuple | set) else [ground_truth]
    accepted = [str(one) for one in accepted if one is not None and str(one).strip()]
    if not accepted:
        raise ValueError(
            f"no answer to compare with: the ground truth is {ground_truth!r}. Put it in the column "
            "reward_model.ground_truth"
        )
    return accepted
