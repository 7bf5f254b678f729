# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible gateway in each agent loop worker: any agent that takes a base_url trains unchanged."""
