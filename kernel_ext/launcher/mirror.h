// SPDX-License-Identifier: MIT
// The launcher's life beside the process that was forked for it: what is done to one is done to the other.
#pragma once

#include "kernel_ext/launcher/request.h"

namespace overmind::launcher {

// Passes signals on until the process has ended, then ends as it did. REQUIRES: all signals are blocked.
[[noreturn]] void mirror(const Options& options, Started started);

}  // namespace overmind::launcher
