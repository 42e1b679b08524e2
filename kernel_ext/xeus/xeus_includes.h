// SPDX-License-Identifier: MIT
// The headers of xeus that both of its APIs have, under their two names.
#pragma once

#if OVERMIND_XEUS >= 5
#include <xeus-zmq/xmiddleware.hpp>
#else
#include <xeus/xmiddleware.hpp>
#endif
