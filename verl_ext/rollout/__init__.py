# SPDX-License-Identifier: Apache-2.0
"""Rollouts: agent loops, environments and the embedded CPU generation engine."""
