# SPDX-License-Identifier: Apache-2.0
"""What other estimators would have done with recorded batches: `verl-ext whatif`."""
