// SPDX-License-Identifier: MIT
// A start without a zygote, and the zygote that is made for the next one.
#pragma once

#include <string>

#include "core/status.h"
#include "kernel_ext/launcher/facts.h"
#include "kernel_ext/launcher/options.h"
#include "kernel_ext/launcher/request.h"

namespace overmind::launcher {

// Replaces this process by the interpreter. With a `place` a second process is left behind, which has this one's
// environment, limits and credentials: it waits until the interpreter says that it is ready (or has ended), and
// becomes the zygote of that place, unless another one was first. Returns only if the interpreter can't be run.
Status run_plain(const Options& options, const Place* place, const std::string& log_path);

// Replaces this process by `python target arguments` and nothing else.
Status run_bare(const Options& options);

// One line for people who wonder: in the log, never on the streams of the user's program.
void log_line(const std::string& log_path, const std::string& message);

}  // namespace overmind::launcher
