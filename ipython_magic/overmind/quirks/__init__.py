# SPDX-License-Identifier: MIT
"""What one library needs beyond plain pickle: one file per library."""
