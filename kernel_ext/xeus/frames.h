// SPDX-License-Identifier: MIT
// Messages as ZeroMQ frames, both ways.
#pragma once

#include <optional>
#include <zmq_addon.hpp>

#include "kernel_ext/xeus/wire.h"

namespace overmind::kernel {

// Identities (or, on iopub, the topic as the only one), delimiter, signature, four parts, buffers.
zmq::multipart_t to_frames(Message message, const Signer& signer);

// Nothing if a frame is missing or the signature is wrong; `why` says which.
std::optional<Message> from_frames(zmq::multipart_t& frames, const Signer& signer, std::string& why);

// A whole message, however many signals come: ZeroMQ gives up in the middle of one (EINTR) when a signal does, and what
// follows would be taken for its rest. Neither waits. zmq::error_t; in a forked child, EINTR: its threads are not
// there.
void send(zmq::multipart_t frames, zmq::socket_ref socket);
bool receive(zmq::multipart_t& frames, zmq::socket_ref socket);  // false: there is none

}  // namespace overmind::kernel
