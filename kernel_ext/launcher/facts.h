// SPDX-License-Identifier: MIT
// What a fork of a zygote inherits and can't change: two starts may share a zygote only if all of it is equal.
#pragma once

#include <string>

#include "kernel_ext/launcher/options.h"

namespace overmind::launcher {

struct Place {
  std::string key;      // all facts as text, compared in full by the zygote
  std::string zygote;   // <instance_dir>/z<hash of key>: socket; with .lock and .json beside it
  std::string profile;  // what starts of this kind have imported; shared by all environments
};

// The facts of this process as it was started. REQUIRES: called before anything of it is changed.
Place place_of(const Options& options, const std::string& instance_dir);

// What tells one state of a file from another; "none" where there is no file.
std::string stamp_of(const std::string& path);

// Whether python would run `path` as source: it is there, and no folder, archive or compiled code.
bool is_source(const std::string& path);

// Why this start is one that only a plain one can do exactly; empty if there is no such reason.
std::string only_plain();

}  // namespace overmind::launcher
