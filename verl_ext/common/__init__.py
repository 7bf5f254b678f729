# SPDX-License-Identifier: Apache-2.0
"""What any other part of the package may use, and what uses none of them."""
