// SPDX-License-Identifier: MIT
// Publishing in the background: fork, and let the child write what memory holds at this instant.
//
// The child runs raw system calls only: no allocation, no libc state, no at-fork handlers, no
// Python. The process may have any number of threads and locks held; none matters to it. Its first
// act is to close every descriptor but the three it needs (it must not hold a kernel's ports, pipes
// or GPU handles), to leave the session (a killpg of the kernel does not reach it) and to become
// idle in priority and first in line for the OOM killer. It is nobody's child: an intermediate
// process made with CLONE_VM|CLONE_VFORK forks it and exits, so the user's process sees no SIGCHLD
// and no zombie.
#pragma once

#include <cstdint>
#include <span>

#include "core/segment.h"
#include "core/status.h"
#include "core/unique_fd.h"

namespace overmind {

struct SnapshotJob {
  int segment_fd;  // writable, sized, unsealed
  const SegmentPlan* plan;
  std::span<const Source> sources;
  int socket_fd;  // SOCK_SEQPACKET to the daemon, blocking or not, used by nobody else any
                  // more; commit_frame goes there after the seal, one reply is awaited 30 s
  std::span<const std::byte> commit_frame;
};

// What the child writes into its status pipe before it exits; nothing at all if it was killed.
struct SnapshotStatus {
  std::int32_t error;  // 0, or the errno of the call that failed
  std::int32_t step;   // which: see snapshot.cc
};

// Returns the read end of the status pipe. Everything `job` points to must stay until this returns,
// no longer; the caller then closes its own segment_fd and socket_fd. Takes as long as a fork of this
// process (page tables: some 10 ms per GB of small pages). Any thread may call it.
// Errors: kExhausted (no process, memory or descriptor to be had), kInvalid (sources are not the plan's), kIo.
Result<UniqueFd> fork_snapshot(const SnapshotJob& job);

// What a report means: ok when committed. kExhausted (memory, RLIMIT_FSIZE), kUnavailable (the daemon
// refused or is gone), kTimeout, kIo.
Status to_status(const SnapshotStatus& report);

}  // namespace overmind
