# SPDX-License-Identifier: Apache-2.0
"""One pass over the logits: log-probabilities, entropies and sums of squares of the safe vocabulary."""
