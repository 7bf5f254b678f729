# SPDX-License-Identifier: Apache-2.0
"""Every name of verl that is used, wrapped or hooked, and what is registered with us."""
