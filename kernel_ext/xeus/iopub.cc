// SPDX-License-Identifier: MIT
#include "kernel_ext/xeus/iopub.h"

#include <utility>

#include "kernel_ext/xeus/frames.h"
#include "kernel_ext/xeus/signals_blocked.h"
#include "kernel_ext/xeus/xeus_includes.h"

namespace overmind::kernel {
namespace {

constexpr const char* kStop = "inproc://overmind-iopub-stop";
constexpr int kLimit = 10'000;   // messages for a client that does not read; what is over it is lost to that one
constexpr char kSubscribed = 1;  // the first byte of what an XPUB socket tells; the rest is the topic

std::string place_of(const Connection& connection) {
  return xeus::get_end_point(connection.transport, connection.ip, std::to_string(connection.iopub_port));
}

}  // namespace

Iopub::Iopub(zmq::context_t& context, const Connection& connection, const Signer& signer, Session& session)
    : signer_(signer),
      session_(session),
      clients_(context, zmq::socket_type::xpub),
      published_(context, zmq::socket_type::sub),
      stop_(context, zmq::socket_type::pair),
      stopped_(context, zmq::socket_type::pair) {
  clients_.set(zmq::sockopt::linger, xeus::get_socket_linger());
  clients_.set(zmq::sockopt::sndhwm, kLimit);
  clients_.bind(place_of(connection));
  published_.set(zmq::sockopt::subscribe, "");
  published_.bind(kEndPoint);
  stopped_.bind(kStop);
  stop_.connect(kStop);
}

Iopub::~Iopub() { stop(); }

int Iopub::port() const {
  const std::string place = clients_.get(zmq::sockopt::last_endpoint);
  return std::stoi(place.substr(place.rfind(':') + 1));
}

void Iopub::start() {
  const SignalsBlocked blocked;
  thread_ = std::thread([this] { forward(); });
}

void Iopub::stop() {
  if (!thread_.joinable()) return;
  stop_.send(zmq::message_t(), zmq::send_flags::none);
  thread_.join();
}

void Iopub::forward() {
  zmq::pollitem_t items[] = {{published_.handle(), 0, ZMQ_POLLIN, 0},
                             {clients_.handle(), 0, ZMQ_POLLIN, 0},
                             {stopped_.handle(), 0, ZMQ_POLLIN, 0}};
  zmq::multipart_t frames;
  while (items[2].revents == 0) {
    zmq::poll(items, 3, std::chrono::milliseconds(-1));
    while (receive(frames, clients_)) welcome(frames.front().to_string_view());
    while (receive(frames, published_)) send(std::move(frames), clients_);
  }
}

// Goes to all who have this subscription, as ipykernel's does; the parent is {}, for those who look into it.
void Iopub::welcome(std::string_view event) {
  if (event.empty() || event.front() != kSubscribed) return;
  std::string topic(event.substr(1));
  std::string bytes = topic;
  if (take_utf8(bytes) != topic) return;  // ipykernel, too, leaves those unanswered that are no UTF-8
  Message message;
  message.header = session_.header("iopub_welcome");
  message.content = "{\"subscription\":";
  append_json_string(message.content, topic);
  message.content += '}';
  if (!topic.empty()) message.identities.push_back(std::move(topic));
  send(to_frames(std::move(message), signer_), clients_);
}

}  // namespace overmind::kernel
