# SPDX-License-Identifier: Apache-2.0
"""What runs beside a candidate in the cage; nothing else is imported there."""
