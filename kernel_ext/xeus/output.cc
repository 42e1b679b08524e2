// SPDX-License-Identifier: MIT
#include "kernel_ext/xeus/output.h"

#include <utility>

#include "kernel_ext/xeus/signals_blocked.h"

namespace overmind::kernel {
namespace {

constexpr std::array<const char*, 2> kNames = {"stdout", "stderr"};

}  // namespace

Output::Output(Publisher& publisher) : publisher_(publisher) {
  const SignalsBlocked blocked;
  thread_ = std::thread(&Output::run, this);
}

Output::~Output() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake_.notify_one();
  thread_.join();
  flush();
}

void Output::write(Stream stream, std::string_view text, const MessagePtr& parent) {
  if (text.empty()) return;
  bool first = false;
  bool full = false;
  {
    const std::lock_guard lock(mutex_);
    auto& pieces = pieces_[static_cast<std::size_t>(stream)];
    if (pieces.empty() || pieces.back().parent != parent) pieces.push_back({parent, {}});
    pieces.back().text += text;
    first = size_ == 0;
    size_ += text.size();
    full = size_ >= kFlushSize;
  }
  if (full)
    flush();
  else if (first)
    wake_.notify_one();
}

void Output::flush() {
  const std::lock_guard sending(send_mutex_);
  Pieces pieces;
  {
    const std::lock_guard lock(mutex_);
    std::swap(pieces, pieces_);
    size_ = 0;
  }
  send(std::move(pieces));
}

void Output::set_parent(MessagePtr parent) {
  const std::lock_guard lock(mutex_);
  parent_ = std::move(parent);
}

MessagePtr Output::parent() const {
  const std::lock_guard lock(mutex_);
  return parent_;
}

void Output::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return ending_ || size_ > 0; });
    if (wake_.wait_for(lock, kFlushInterval, [this] { return ending_; })) return;
    lock.unlock();
    flush();
    lock.lock();
  }
}

void Output::send(Pieces pieces) {
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    for (Piece& piece : pieces[i]) {
      std::string content = "{\"name\":\"";
      content += kNames[i];
      content += "\",\"text\":";
      append_json_string(content, piece.text);
      content += '}';
      publisher_.publish(std::string("stream.") + kNames[i], "stream", piece.parent.get(), "{}", std::move(content));
    }
  }
}

}  // namespace overmind::kernel
