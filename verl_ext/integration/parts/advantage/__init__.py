# SPDX-License-Identifier: Apache-2.0
"""What happens to the rows of a batch up to the advantage."""
