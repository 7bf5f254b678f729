# SPDX-License-Identifier: Apache-2.0
"""Reward functions in verl's form, for ``reward.custom_reward_function`` and for orchestras.

``reward.custom_reward_function.path=pkg://verl_ext.rewards.math`` (or ``.qa``), ``name=compute_score``; options of the
functions go to ``reward.custom_reward_function.reward_kwargs``.
"""
