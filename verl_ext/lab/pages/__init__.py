# SPDX-License-Identifier: Apache-2.0
"""What the HTML pages share."""
