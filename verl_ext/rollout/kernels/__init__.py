# SPDX-License-Identifier: Apache-2.0
"""Kernels that a model writes: judged, timed and rewarded. `judge` is the way in; docs/kernels.md has the picture."""
