# SPDX-License-Identifier: Apache-2.0
"""What every wing may use, and knows none of them."""
