# SPDX-License-Identifier: Apache-2.0
"""What the agent loops have in common: model calls and their turns, tools, scores, text of others."""
