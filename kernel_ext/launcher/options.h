// SPDX-License-Identifier: MIT
// What the launcher was asked for.
#pragma once

#include <string>
#include <vector>

namespace overmind::launcher {

struct Options {
  std::string python;             // absolute path of the interpreter
  std::string boot;               // overmind/zygote/boot.py of the same installation
  std::string mode;               // "script", "module" or "kernel"
  std::string target;             // the script as given, the module's name, or the engine
  std::vector<std::string> argv;  // what sys.argv[1:] becomes
};

}  // namespace overmind::launcher
