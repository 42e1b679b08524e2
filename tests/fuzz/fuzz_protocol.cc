// SPDX-License-Identifier: MIT
// Whatever bytes a peer sends, decoding ends in a value or in kInvalid; a value encodes to what decodes again.
#include <cstdint>
#include <cstdlib>

#include "core/protocol.h"

namespace {

template <typename Message, typename Decode>
void check(std::span<const std::byte> frame, Decode decode) {
  overmind::Result<Message> message = decode(frame);
  if (!message.ok()) {
    if (message.status().code() != overmind::Code::kInvalid || message.status().message().empty()) std::abort();
    return;
  }
  overmind::Result<Message> again = decode(overmind::protocol::encode(message.value()));
  if (!again.ok() || again.value().index() != message.value().index()) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::span<const std::byte> frame(reinterpret_cast<const std::byte*>(data), size);
  check<overmind::protocol::Request>(frame, overmind::protocol::decode_request);
  check<overmind::protocol::Reply>(frame, overmind::protocol::decode_reply);
  return 0;
}
