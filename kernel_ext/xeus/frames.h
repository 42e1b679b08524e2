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

}  // namespace overmind::kernel
