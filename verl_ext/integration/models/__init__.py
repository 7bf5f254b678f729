# SPDX-License-Identifier: Apache-2.0
"""Several models in one run: what each of them does with its own sequences. See `lead` and `members`."""
