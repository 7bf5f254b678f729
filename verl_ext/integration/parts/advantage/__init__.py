# SPDX-License-Identifier: Apache-2.0
"""What happens to the turns of a batch up to the advantage."""
