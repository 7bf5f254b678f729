# SPDX-License-Identifier: Apache-2.0
"""The embedded rollout engine: continuous batching over a transformers model inside one Ray actor.

``sampling``, ``kv_cache``, ``engine`` and ``weights`` need torch and transformers only and can be used by hand;
``server`` and ``replica`` attach them to verl (``actor_rollout_ref.rollout.name=embedded``).
"""
