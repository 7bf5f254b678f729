# SPDX-License-Identifier: Apache-2.0
"""Reads the oracle vectors: cases of `tests/vectors/<method>.json` as tensors (schema in tests/vectors/README.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

VECTORS = Path(__file__).resolve().parents[1] / "vectors"


def load_cases(method: str) -> list[dict[str, Any]]:
    return json.loads((VECTORS / f"{method}.json").read_text(encoding="utf-8"))["cases"]


def case_name(case: dict[str, Any]) -> str:
    return case["name"]


def pad(ragged: list[list[float]], length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Restore a token field whose trailing zeros were cut."""
    tokens = torch.zeros(len(ragged), length, dtype=dtype)
    for row, values in enumerate(ragged):
        if values:
            tokens[row, : len(values)] = torch.tensor(values, dtype=dtype)
    return tokens


def token_field(case: dict[str, Any], name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return pad(case["inputs"][name], case["inputs"]["response_length"], dtype)


def row_field(case: dict[str, Any], name: str) -> np.ndarray:
    values = case["inputs"][name]
    if name in ("turn_index", "turn_reward", "is_action_valid", "valid_row"):
        return np.array(values)
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def row_fields(case: dict[str, Any], *names: str) -> dict[str, np.ndarray]:
    return {name: row_field(case, name) for name in names if name in case["inputs"]}


def assert_expected(case: dict[str, Any], name: str, got: Any) -> None:
    """Compare with the stored field within the case's tolerance: |got - expected| <= atol + rtol |expected|."""
    expected = case["expected"][name]
    got = np.asarray(got.detach() if isinstance(got, torch.Tensor) else got, dtype=np.float64)
    if isinstance(expected, list) and expected and isinstance(expected[0], list):
        expected = pad(expected, case["inputs"]["response_length"], torch.float64).numpy()
    tolerance = {**case["tolerance"], **case["tolerance"].get(name, {})}
    np.testing.assert_allclose(got, np.asarray(expected), atol=tolerance["atol"], rtol=tolerance["rtol"], err_msg=name)
