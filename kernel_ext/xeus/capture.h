// SPDX-License-Identifier: MIT
// What is written to descriptors 1 and 2 below Python (printf, subprocesses, forked children) becomes output, too.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

#include "core/unique_fd.h"
#include "kernel_ext/xeus/output.h"

namespace overmind::kernel {

// Puts pipes in the place of descriptors 1 and 2 and reads them on a thread of its own; a copy of all goes to where
// they led before, as long as that takes it. Thread-safe.
class Capture {
 public:
  explicit Capture(Output& output);  // throws std::system_error
  ~Capture();                        // puts the descriptors back; everything written before has been read
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  // Returns when all that was written before the call is in the Output.
  void drain();

  // Where descriptor 1 or 2 led; -1 if it was closed.
  int original(Stream stream) const { return pipes_[static_cast<std::size_t>(stream)].original.get(); }

 private:
  struct Pipe {
    UniqueFd original;  // a copy of the descriptor as it was
    UniqueFd reader;
    std::string partial;  // the beginning of a character; the reading thread's only
    std::uint64_t delivered = 0;
  };

  void redirect(int fd);
  void run();
  bool read_some(Stream stream);

  Output& output_;
  std::array<Pipe, 2> pipes_;
  UniqueFd stop_;
  std::mutex mutex_;
  std::condition_variable progress_;
  bool reading_ = false;  // between a read and its delivery
  std::thread thread_;
};

}  // namespace overmind::kernel
