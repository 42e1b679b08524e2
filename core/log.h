// SPDX-License-Identifier: MIT
// The daemon's log: one file, one line shape:
//   2026-01-31T12:00:00.123Z warning 4711 what happened, to what
// Thread safety: open_log() once, before other threads; log_line() from any thread.
#pragma once

#include <string>
#include <string_view>

#include "core/status.h"

namespace overmind {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// "debug", "info", "warning", "error"; anything else is kWarning.
LogLevel log_level_from(std::string_view name);

// Appends to `path` (0600, no symlink, own file). One older file is kept: past 1 MiB the file moves to
// `path`.old first. Without this call nothing is logged. Errors: kDenied, kIo.
Status open_log(const std::string& path, LogLevel level);

// The log's descriptor, or -1.
int log_fd();

// Control characters of `message` become '?': one call is one line, whatever a peer put into it.
void log_line(LogLevel level, std::string_view message);

}  // namespace overmind
