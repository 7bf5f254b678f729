# SPDX-License-Identifier: Apache-2.0
"""A run without an accelerator: the platform, and an engine for rollouts."""
