// SPDX-License-Identifier: MIT
// stdout and stderr on their way to iopub: collected, and sent as few messages.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kernel_ext/xeus/publisher.h"
#include "kernel_ext/xeus/wire.h"

namespace overmind::kernel {

enum class Stream { kStdout = 0, kStderr = 1 };

// Thread-safe. What is written appears after kFlushInterval, at flush(), or once there is kFlushSize of it.
class Output {
 public:
  static constexpr auto kFlushInterval = std::chrono::milliseconds(100);
  static constexpr std::size_t kFlushSize = std::size_t{4} << 20;

  explicit Output(Publisher& publisher);
  ~Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  // `text` is UTF-8. `parent`: the request that the text belongs to, may be null.
  void write(Stream stream, std::string_view text, const MessagePtr& parent);
  void flush();

  // Whose output it is that comes from below Python (capture.h).
  void set_parent(MessagePtr parent);
  MessagePtr parent() const;

 private:
  struct Piece {
    MessagePtr parent;
    std::string text;
  };
  using Pieces = std::array<std::vector<Piece>, 2>;

  void run();
  void send(Pieces pieces);

  Publisher& publisher_;
  mutable std::mutex mutex_;
  std::mutex send_mutex_;  // held from the taking of pieces to the end of their sending: keeps the order
  std::condition_variable wake_;
  Pieces pieces_;
  std::size_t size_ = 0;
  MessagePtr parent_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace overmind::kernel
