// SPDX-License-Identifier: MIT
#include "kernel_ext/xeus/publisher.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "kernel_ext/xeus/frames.h"
#include "kernel_ext/xeus/iopub.h"
#include "kernel_ext/xeus/xeus_includes.h"

namespace overmind::kernel {
namespace {

// Messages in a second; as many at once as are sent in a tenth of one. ipykernel sends 3,500 to 5,500 flushed lines in
// a second (two cores), and jupyter_client reads about as many. We sent 30,000, and iopub's socket dropped what was not
// read in time, the cell's idle with it: the client waited for ever.
constexpr int kRate = 5000;
constexpr auto kInterval = std::chrono::microseconds(1'000'000 / kRate);
constexpr auto kAtOnce = kInterval * (kRate / 10);

}  // namespace

Publisher::Publisher(zmq::context_t& context, const Signer& signer, Session& session)
    : signer_(signer), session_(session), socket_(context, zmq::socket_type::pub) {
  // No limit: a PUB socket drops what goes over it, and the thread of Iopub may be slower than a loop of displays.
  socket_.set(zmq::sockopt::sndhwm, 0);
  socket_.set(zmq::sockopt::linger, xeus::get_socket_linger());
  socket_.connect(Iopub::kEndPoint);
}

void Publisher::publish(std::string topic, std::string_view msg_type, const Message* parent, std::string metadata,
                        std::string content, std::vector<std::string> buffers) {
  Message message;
  message.identities.push_back(std::move(topic));
  message.header = session_.header(msg_type);
  if (parent != nullptr) message.parent_header = parent->header;
  message.metadata = std::move(metadata);
  message.content = std::move(content);
  message.buffers = std::move(buffers);
  zmq::multipart_t frames = to_frames(std::move(message), signer_);
  Clock::time_point turn;
  {
    const std::lock_guard lock(mutex_);
    send(std::move(frames), socket_);
    turn = next_turn();
  }
  std::this_thread::sleep_until(turn);
}

// When the message after this one may go. REQUIRES: mutex_.
Publisher::Clock::time_point Publisher::next_turn() {
  turn_ = std::max(turn_, Clock::now() - kAtOnce) + kInterval;
  return turn_;
}

void Publisher::status(std::string_view state, const Message* parent) {
  std::string content = "{\"execution_state\":\"";
  content += state;
  content += "\"}";
  publish("kernel." + session_.id() + ".status", "status", parent, "{}", std::move(content));
}

}  // namespace overmind::kernel
