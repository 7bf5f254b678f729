# SPDX-License-Identifier: Apache-2.0
"""What the agent loops have in common: model calls and their rows, tools, scores, text of others."""
