# SPDX-License-Identifier: Apache-2.0
"""Transcripts of rollouts: written during training (``verl_ext.rollouts_dir``), read by ``verl-ext rollouts``.

A folder of transcripts holds one file a training step, ``<step>.jsonl``, with one line a trajectory: ``step`` (int),
``trajectory`` and ``prompt_uid`` (str), ``outcome`` (``success``, ``failure`` or ``error``), ``reward`` (float, the
undiscounted sum of the turns' rewards where they are known, else the score), ``score`` (float), ``agents`` (list of
names), ``failure`` and ``stop_reason`` (str, empty if none), ``info`` (numbers that the agent loop reports) and
``turns``: a list with, for each turn, ``turn`` (int), ``agent``, ``prompt``, ``response`` (str, special tokens
included), ``prompt_tokens``, ``response_tokens`` (int), ``action``, ``observation`` (if the agent loop gives them),
``reward`` (float or null), ``valid`` (bool: the action could be parsed), ``counted`` (bool: a sample, not masked),
``advantage`` (float, the mean over the turn's model tokens) and ``more`` (what else the agent loop says of the turn).

Reading needs the standard library only.
"""
