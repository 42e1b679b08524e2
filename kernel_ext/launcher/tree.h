// SPDX-License-Identifier: MIT
// Processes below a process.
#pragma once

#include <sys/types.h>

#include <vector>

namespace overmind::launcher {

// Its children, theirs, and so on, as the system has them just now; without it, and without those whose own parent
// has ended.
std::vector<pid_t> descendants_of(pid_t pid);

}  // namespace overmind::launcher
