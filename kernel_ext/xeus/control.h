// SPDX-License-Identifier: MIT
// The control channel on its own thread: answers while the main thread is busy with the user's code.
#pragma once

#include <functional>
#include <thread>

#include "core/unique_fd.h"
#include "kernel_ext/xeus/publisher.h"
#include "kernel_ext/xeus/server.h"

namespace overmind::kernel {

class Control {
 public:
  using Handler = std::function<void(MessagePtr)>;

  // Serves `server`'s control channel until it is destroyed. Interrupts are answered here, without Python, which may
  // be stuck; everything else goes to `handler`, on this thread, one after another. The process ends at once with
  // status 1 when the process `parent_pid` does (0: nobody is watched). `handler` must not throw.
  Control(Server& server, Publisher& publisher, Session& session, Handler handler, int parent_pid);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  bool is_current_thread() const { return std::this_thread::get_id() == thread_.get_id(); }

 private:
  void run();
  void handle(Message message);
  void interrupt(const Message& request);

  Server& server_;
  Publisher& publisher_;
  Session& session_;
  Handler handler_;
  UniqueFd stop_;
  UniqueFd parent_;
  std::thread thread_;
};

}  // namespace overmind::kernel
