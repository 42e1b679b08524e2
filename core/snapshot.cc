// SPDX-License-Identifier: MIT
// Three processes take part:
//   caller        blocks its signals, makes the intermediate with CLONE_VM|CLONE_VFORK on a stack of its
//                 own, and sleeps until that one has exited
//   intermediate  shares the caller's memory; leaves its session, forks the child and exits. Its exit
//                 signal is 0, so it is reaped here with __WCLONE and nobody's SIGCHLD handler or
//                 waitpid(-1) sees it
//   child         a copy-on-write copy of the caller at this instant, adopted by init (or by the nearest
//                 subreaper: a caller that is one, or is process 1, must reap it as it does others)
// Steps of the child:
//   1 close every descriptor but segment, socket and pipe       4 seal
//   2 leave its folder, become idle, first OOM victim           5 send the commit frame, await one reply
//   3 write head and buffers                                    6 report into the pipe
//                                                               7 make the pages huge, exit
// A plain fork would run at-fork handlers of other libraries and raise SIGCHLD; posix_spawn cannot keep
// the memory; a thread would read memory that the user is already changing.
//
// In intermediate and child nothing of libc is called and nothing is allocated: another thread may have
// held any lock when memory was copied, and errno of the intermediate is the caller's.
#include "core/snapshot.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <string>
#include <system_error>

#include "core/raw_syscall.h"

namespace overmind {
namespace {

constexpr std::uint64_t kChunk = 8 << 20;
constexpr std::size_t kStackSize = 64 * 1024;
constexpr long kCommitSeconds = 30;  // for the daemon to take the frame, and again to answer
// Of linux/ioprio.h, which calls a parameter `class` in some versions and is no C++ then.
constexpr long kIoprioOfProcess = 1, kIoprioIdle = 3 << 13;
constexpr long kMadviseCollapse = 25;  // MADV_COLLAPSE, which Debian 12's headers lack
constexpr int kCollapseFailures = 16;  // in a row: no huge page is to be had
constexpr int kSeals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;

enum Step : std::int32_t { kWriteHead = 1, kWriteBuffers, kSeal, kSend, kReply };

// All that the two processes need, in plain pointers: their code calls no inline function of the
// library either, since a debug build compiles those with instrumentation.
struct Work {
  const std::byte* head;
  std::uint64_t head_size;
  const Source* sources;
  const Range* buffers;
  std::uint64_t buffer_count;
  const std::byte* frame;
  std::uint64_t frame_size;
  std::uint64_t segment_size;
  int segment_fd;
  int socket_fd;
  int pipe_fd;
  long child;  // written by the intermediate: process ID, or -errno
};

template <typename T>
OVERMIND_UNINSTRUMENTED long as_long(T* pointer) {
  return reinterpret_cast<long>(pointer);
}

// ---- step 1 ----------------------------------------------------------------------------------

OVERMIND_UNINSTRUMENTED bool is_kept(const Work* work, long fd) {
  return fd == work->segment_fd || fd == work->socket_fd || fd == work->pipe_fd;
}

OVERMIND_UNINSTRUMENTED long next_kept(const Work* work, long from) {
  long next = -1;
  const int kept[] = {work->segment_fd, work->socket_fd, work->pipe_fd};
  for (const int fd : kept) {
    if (fd >= from && (next < 0 || fd < next)) next = fd;
  }
  return next;
}

// False where the kernel has no close_range (before 5.9).
OVERMIND_UNINSTRUMENTED bool close_ranges(const Work* work) {
  for (long from = 0;;) {
    const long kept = next_kept(work, from);
    const long last = kept < 0 ? static_cast<long>(~0u) : kept - 1;
    if (last >= from && raw_syscall(SYS_close_range, from, last, 0) != 0) return false;
    if (kept < 0) return true;
    from = kept + 1;
  }
}

// -1 for "." and "..".
OVERMIND_UNINSTRUMENTED long parse_descriptor(const char* name) {
  if (*name < '0' || *name > '9') return -1;
  long fd = 0;
  for (; *name >= '0' && *name <= '9'; ++name) fd = fd * 10 + (*name - '0');
  return fd;
}

// Closes what one pass over /proc/self/fd shows; returns how many.
OVERMIND_UNINSTRUMENTED long close_listed(const Work* work, long folder) {
  alignas(dirent64) char entries[2048];
  long closed = 0, size;
  while ((size = raw_syscall(SYS_getdents64, folder, as_long(entries), sizeof entries)) > 0) {
    for (long at = 0; at < size;) {
      const auto* entry = reinterpret_cast<const dirent64*>(entries + at);
      at += entry->d_reclen;  // NOLINT(clang-analyzer-core.uninitialized.Assign): the kernel wrote it
      const long fd = parse_descriptor(entry->d_name);
      if (fd < 0 || fd == folder || is_kept(work, fd)) continue;
      closed += raw_syscall(SYS_close, fd) == 0;
    }
  }
  return closed;
}

OVERMIND_UNINSTRUMENTED void close_others(const Work* work) {
  if (close_ranges(work)) return;
  const long folder = raw_syscall(SYS_openat, AT_FDCWD, as_long("/proc/self/fd"), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) {
    // Closing while listing may skip some: again until a pass finds none.
    while (close_listed(work, folder) > 0) raw_syscall(SYS_lseek, folder, 0, SEEK_SET);
    raw_syscall(SYS_close, folder);
    return;
  }
  for (long fd = 0; fd < 65536; ++fd) {
    if (!is_kept(work, fd)) raw_syscall(SYS_close, fd);
  }
}

// ---- step 2: each is a courtesy, none is worth failing for --------------------------------------

OVERMIND_UNINSTRUMENTED void step_aside() {
  raw_syscall(SYS_chdir, as_long("/"));
  raw_syscall(SYS_prctl, PR_SET_NAME, as_long("overmind-snap"));
  const int no_priority = 0;  // struct sched_param
  raw_syscall(SYS_sched_setscheduler, 0, SCHED_IDLE, as_long(&no_priority));
  raw_syscall(SYS_ioprio_set, kIoprioOfProcess, 0, kIoprioIdle);
  const long file = raw_syscall(SYS_openat, AT_FDCWD, as_long("/proc/self/oom_score_adj"), O_WRONLY | O_CLOEXEC);
  if (file >= 0) {
    raw_syscall(SYS_write, file, as_long("1000"), 4);
    raw_syscall(SYS_close, file);
  }
}

// ---- steps 3 to 6: 0 or -errno -----------------------------------------------------------------

OVERMIND_UNINSTRUMENTED long write_at(int fd, const std::byte* data, std::uint64_t size, std::uint64_t offset) {
  while (size > 0) {
    const std::uint64_t wanted = size < kChunk ? size : kChunk;
    const long written =
        raw_syscall(SYS_pwrite64, fd, as_long(data), static_cast<long>(wanted), static_cast<long>(offset));
    if (written == -EINTR) continue;
    if (written < 0) return written;
    if (written == 0) return -EIO;
    data += written;
    size -= static_cast<std::uint64_t>(written);
    offset += static_cast<std::uint64_t>(written);
  }
  return 0;
}

OVERMIND_UNINSTRUMENTED long write_buffers(const Work* work) {
  for (std::uint64_t i = 0; i < work->buffer_count; ++i) {
    const Source* source = work->sources + i;
    const long result =
        write_at(work->segment_fd, static_cast<const std::byte*>(source->data), source->size, work->buffers[i].offset);
    if (result != 0) return result;
  }
  return 0;
}

// The socket may be blocking or not: its owner chose.
OVERMIND_UNINSTRUMENTED long await(int fd, short events) {
  pollfd poll{fd, events, 0};
  timespec left{kCommitSeconds, 0};  // the kernel counts it down across EINTR
  long ready;
  do {
    ready = raw_syscall(SYS_ppoll, as_long(&poll), 1, as_long(&left), 0, 0);
  } while (ready == -EINTR);
  return ready > 0 ? 0 : ready == 0 ? -ETIMEDOUT : ready;
}

OVERMIND_UNINSTRUMENTED long send_frame(const Work* work) {
  for (;;) {
    const long sent = raw_syscall(SYS_sendto, work->socket_fd, as_long(work->frame),
                                  static_cast<long>(work->frame_size), MSG_NOSIGNAL | MSG_DONTWAIT, 0, 0);
    if (sent >= 0) return sent == static_cast<long>(work->frame_size) ? 0 : -EMSGSIZE;
    if (sent == -EINTR) continue;
    if (sent != -EAGAIN) return sent;
    const long ready = await(work->socket_fd, POLLOUT);
    if (ready != 0) return ready;
  }
}

// Any reply is an acknowledgement; a daemon that refuses closes the connection instead.
OVERMIND_UNINSTRUMENTED long receive_reply(const Work* work) {
  for (;;) {
    const long ready = await(work->socket_fd, POLLIN);
    if (ready != 0) return ready;
    char first;
    const long received = raw_syscall(SYS_recvfrom, work->socket_fd, as_long(&first), 1, MSG_DONTWAIT, 0, 0);
    if (received > 0) return 0;
    if (received == 0) return -ECONNABORTED;
    if (received != -EINTR && received != -EAGAIN) return received;
  }
}

OVERMIND_UNINSTRUMENTED std::int32_t publish(const Work* work, long* result) {
  *result = write_at(work->segment_fd, work->head, work->head_size, 0);
  if (*result != 0) return kWriteHead;
  *result = write_buffers(work);
  if (*result != 0) return kWriteBuffers;
  *result = raw_syscall(SYS_fcntl, work->segment_fd, F_ADD_SEALS, kSeals);
  if (*result != 0) return kSeal;
  *result = send_frame(work);
  if (*result != 0) return kSend;
  *result = receive_reply(work);
  return *result != 0 ? kReply : 0;
}

// ---- step 7 ------------------------------------------------------------------------------------

// Lets go of the copies of the user's memory: what the user changes from now on need not be kept for us.
OVERMIND_UNINSTRUMENTED void release_sources(const Work* work) {
  for (std::uint64_t i = 0; i < work->buffer_count; ++i) {
    const auto start = reinterpret_cast<std::uintptr_t>(work->sources[i].data);
    const std::uint64_t first = (start + kPageAlign - 1) & ~(kPageAlign - 1);
    const std::uint64_t end = (start + work->sources[i].size) & ~(kPageAlign - 1);
    // Small ones share their pages with the allocator, and perhaps with what is still needed here.
    if (work->sources[i].size >= kHugePage && end > first)
      raw_syscall(SYS_munmap, static_cast<long>(first), static_cast<long>(end - first));
  }
}

// Turns the segment's pages into huge ones, which a reader maps with one fault for 2 MiB: first touch of 1 GiB takes
// 4 ms instead of 65. MADV_COLLAPSE (Linux 6.1) needs no setting of the machine's; where it is unknown, or no huge
// page is free, the segment stays as it is. 1.3 s of idle time per GiB, after the commit: nobody waits for it.
OVERMIND_UNINSTRUMENTED void collapse(const Work* work) {
  const std::uint64_t size = work->segment_size & ~(kHugePage - 1);
  if (size == 0) return;
  const long room = raw_syscall(SYS_mmap, 0, static_cast<long>(size + kHugePage), PROT_NONE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room < 0 && room > -4096) return;
  const std::uint64_t start = (static_cast<std::uint64_t>(room) + kHugePage - 1) & ~(kHugePage - 1);
  const long mapped = raw_syscall(SYS_mmap, static_cast<long>(start), static_cast<long>(size), PROT_READ,
                                  MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, work->segment_fd, 0);
  if (mapped < 0 && mapped > -4096) return;
  int failures = 0;
  for (std::uint64_t at = start; at < start + size && failures < kCollapseFailures; at += kHugePage) {
    const long result = raw_syscall(SYS_madvise, static_cast<long>(at), static_cast<long>(kHugePage), kMadviseCollapse);
    if (result == -EINVAL) return;
    failures = result == 0 ? 0 : failures + 1;
  }
}

// Every signal stays blocked: SIGINT, SIGTERM and SIGHUP meant for the kernel do not end it, SIGXFSZ
// becomes EFBIG, SIGPIPE EPIPE, and none of the user's handlers runs. A fault in itself still kills it
// (blocked synchronous signals do), and so does SIGKILL. PR_SET_PDEATHSIG is cleared by fork.
[[noreturn]] OVERMIND_UNINSTRUMENTED void run_child(const Work* work) {
  close_others(work);
  step_aside();
  long result = 0;
  SnapshotStatus report;
  report.step = publish(work, &result);
  report.error = static_cast<std::int32_t>(-result);
  raw_syscall(SYS_write, work->pipe_fd, as_long(&report), sizeof report);
  raw_syscall(SYS_close, work->pipe_fd);
  raw_syscall(SYS_close, work->socket_fd);
  if (report.error == 0) {
    release_sources(work);
    collapse(work);
  }
  for (;;) raw_syscall(SYS_exit_group, 0);
}

[[noreturn]] OVERMIND_UNINSTRUMENTED void run_intermediate(void* argument) {
  auto* work = static_cast<Work*>(argument);
  // Here and not in the child, which is then born outside of the kernel's session and process group: a
  // killpg right after the fork was seen to be quicker than the child's first steps.
  raw_syscall(SYS_setsid);
  const long pid = raw_syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);  // a fork: flags only
  if (pid == 0) run_child(work);
  work->child = pid;
  for (;;) raw_syscall(SYS_exit_group, 0);
}

// ---- the caller ----------------------------------------------------------------------------------

// Blocks all signals of this thread, those that libc keeps to itself too: a handler that ran in the
// intermediate would run in the caller's memory under another process ID.
class SignalBlock {
 public:
  SignalBlock() {
    const std::uint64_t all = ~std::uint64_t{0};
    raw_syscall(SYS_rt_sigprocmask, SIG_SETMASK, as_long(&all), as_long(&before_), sizeof all);
  }
  ~SignalBlock() { raw_syscall(SYS_rt_sigprocmask, SIG_SETMASK, as_long(&before_), 0, sizeof before_); }
  SignalBlock(const SignalBlock&) = delete;
  SignalBlock& operator=(const SignalBlock&) = delete;

 private:
  std::uint64_t before_ = 0;
};

void reap(pid_t pid) {
  // ECHILD: a wait with __WALL elsewhere was quicker; all the same.
  while (::waitpid(pid, nullptr, __WCLONE) < 0 && errno == EINTR) {
  }
}

Status fork_child(Work& work) {
  void* stack = ::mmap(nullptr, kStackSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  if (stack == MAP_FAILED) return errno_status("stack of the snapshot");
  long pid;
  {
    const SignalBlock block;
    pid = raw_clone(CLONE_VM | CLONE_VFORK, static_cast<char*>(stack) + kStackSize, run_intermediate, &work);
    if (pid >= 0) reap(static_cast<pid_t>(pid));
  }
  ::munmap(stack, kStackSize);
  if (pid >= 0) pid = work.child;
  if (pid < 0) return errno_status("forking the snapshot", static_cast<int>(-pid));
  return {};
}

std::string_view step_name(std::int32_t step) {
  switch (step) {
    case kWriteHead:
      return "writing the head of the segment";
    case kWriteBuffers:
      return "writing the segment";
    case kSeal:
      return "sealing the segment";
    case kSend:
      return "telling the daemon";
    case kReply:
      return "the daemon's answer";
    default:
      return "an unknown step";
  }
}

}  // namespace

Result<UniqueFd> fork_snapshot(const SnapshotJob& job) {
  if (Status status = check_sources(*job.plan, job.sources); !status.ok()) return status;
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return errno_status("status pipe of the snapshot");
  UniqueFd read_end(ends[0]);
  const UniqueFd write_end(ends[1]);
  Work work{job.plan->head.data(),   job.plan->head.size(),
            job.sources.data(),      job.plan->buffers.data(),
            job.sources.size(),      job.commit_frame.data(),
            job.commit_frame.size(), job.plan->total_size,
            job.segment_fd,          job.socket_fd,
            write_end.get(),         -ECHILD};  // stands if the intermediate is killed before it wrote
  if (Status status = fork_child(work); !status.ok()) return status;
  return read_end;
}

Status to_status(const SnapshotStatus& report) {
  if (report.error == 0) return {};
  const std::string context = "snapshot: " + std::string(step_name(report.step));
  if (report.step == kReply && report.error == ECONNABORTED) {
    return Status(Code::kUnavailable, context + ": refused, or the daemon is gone");
  }
  return errno_status(context, report.error);
}

}  // namespace overmind
