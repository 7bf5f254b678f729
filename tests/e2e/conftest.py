# SPDX-License-Identifier: Apache-2.0
"""One model and one data set for all end-to-end runs of the session."""

from __future__ import annotations

import pytest
from harness import REWARD, Lab, make_data, make_model


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    root = tmp_path_factory.mktemp("e2e")
    model = make_model(root / "model")
    data = make_data(root)
    reward = root / "reward.py"
    reward.write_text(REWARD)
    return Lab(model=model, data=data, reward=reward, root=root)
