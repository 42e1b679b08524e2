// SPDX-License-Identifier: MIT
// Arguments are converted with the GIL, the call is made without it, the answer is converted with it again.
#include "kernel_ext/client_bindings.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <utility>

#include "core/client.h"
#include "kernel_ext/bytes.h"
#include "kernel_ext/errors.h"
#include "kernel_ext/segment_object.h"

namespace overmind {
namespace py = pybind11;
namespace {

// Cheaper to write here than to fork for: 4 MiB are written in 4 ms, and a fork of a process that maps 4 GB costs more.
constexpr std::uint64_t kInlineLimit = 4u << 20;

template <typename Call>
auto unlocked(Call&& call) {
  const py::gil_scoped_release release;
  return std::forward<Call>(call)();
}

// A lease that is given back when its Python object goes, unless it was used. Not in a forked child: the
// lease is the parent's.
class HeldLease {
 public:
  HeldLease(std::shared_ptr<Client> client, Lease lease) : client_(std::move(client)), lease_(lease) {}
  HeldLease(const HeldLease&) = delete;
  HeldLease& operator=(const HeldLease&) = delete;
  ~HeldLease() { release(); }

  void release() {
    if (std::exchange(used_, true) || ::getpid() != pid_) return;
    unlocked([&] { client_->abandon(lease_); });
  }
  Lease use() {
    if (std::exchange(used_, true)) throw py::value_error("this lease was used or released before");
    return lease_;
  }

 private:
  std::shared_ptr<Client> client_;
  Lease lease_;
  pid_t pid_ = ::getpid();
  bool used_ = false;  // guarded by the GIL
};

class SharedPublication {
 public:
  explicit SharedPublication(std::unique_ptr<Publication> publication) : publication_(std::move(publication)) {}
  std::string entry_id() const { return entry_id_to_string(publication_->id()); }
  std::string failure() {
    const std::lock_guard lock(mutex_);
    return publication_->failure().ok() ? std::string() : publication_->failure().to_string();
  }
  py::object wait(double timeout) {
    const auto state = unlocked([&] {
      const std::lock_guard lock(mutex_);
      return publication_->wait(timeout);
    });
    if (state == Publication::State::kRunning) return py::none();
    return py::bool_(state == Publication::State::kCommitted);
  }

 private:
  std::mutex mutex_;  // two threads may wait for one publication; never taken while holding the GIL and waiting
  std::unique_ptr<Publication> publication_;
};

Key to_key(const py::bytes& bytes) {
  const auto text = as_bytes(bytes);
  Key key{};
  if (text.size() != key.size()) throw py::value_error("a key has 32 bytes, not " + std::to_string(text.size()));
  std::transform(text.begin(), text.end(), key.begin(),
                 [](std::byte byte) { return std::to_integer<std::uint8_t>(byte); });
  return key;
}

EntryId to_id(const std::string& text) { return value_or_raise(entry_id_from_string(text)); }

std::string hex(const Key& key) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : key) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

using SharedClient = std::shared_ptr<Client>;

py::object lookup(const SharedClient& client, const py::bytes& key_bytes, bool lease, double wait) {
  const Key key = to_key(key_bytes);
  Lookup found = value_or_raise(unlocked([&] { return client->lookup(key, lease, wait); }));
  switch (found.kind) {
    case Lookup::Kind::kHit:
      return py::cast(Segment(tell_when_unmapped(client, std::move(found.mapping))));
    case Lookup::Kind::kLease:
      return py::cast(std::make_unique<HeldLease>(client, found.lease));
    case Lookup::Kind::kBusy:
      return py::cast(found.busy);
    case Lookup::Kind::kAbsent:
      break;
  }
  return py::none();
}

Segment open(const SharedClient& client, const std::string& entry_id) {
  const EntryId id = to_id(entry_id);
  return Segment(tell_when_unmapped(client, value_or_raise(unlocked([&] { return client->open(id); }))));
}

std::unique_ptr<SharedPublication> publish(const SharedClient& client, HeldLease& held, const std::string& loader,
                                           const std::string& target, double native_seconds, const py::bytes& meta,
                                           const py::bytes& skeleton, const py::bytes& tensors,
                                           const py::sequence& buffers, std::uint64_t inline_limit) {
  const std::vector<Source> sources = to_sources(buffers);
  const Lease lease = held.use();
  Manifest draft;
  draft.key = lease.key;
  draft.loader = loader;
  draft.target = target;
  draft.native_ns = static_cast<std::uint64_t>(std::llround(std::max(native_seconds, 0.0) * 1e9));
  auto publication = unlocked([&] {
    return client->publish(lease, draft, as_bytes(meta), as_bytes(skeleton), as_bytes(tensors), sources, inline_limit);
  });
  return std::make_unique<SharedPublication>(value_or_raise(std::move(publication)));
}

py::list list(const SharedClient& client) {
  using namespace pybind11::literals;
  py::list result;
  for (const EntryInfo& entry : value_or_raise(unlocked([&] { return client->list(); })))
    result.append(py::dict("id"_a = entry_id_to_string(entry.id), "key"_a = hex(entry.key), "loader"_a = entry.loader,
                           "target"_a = entry.target, "nbytes"_a = entry.nbytes, "created"_a = entry.created,
                           "last_used"_a = entry.last_used, "native_seconds"_a = entry.native_seconds,
                           "hits"_a = entry.hits, "mapped_by"_a = entry.mapped_by, "pinned"_a = entry.pinned));
  return result;
}

py::dict stats(const SharedClient& client) {
  using namespace pybind11::literals;
  const StoreStats stats = value_or_raise(unlocked([&] { return client->stats(); }));
  return py::dict("budget"_a = stats.budget, "used"_a = stats.used, "pinned"_a = stats.pinned,
                  "mapped"_a = stats.mapped, "reserved"_a = stats.reserved, "entries"_a = stats.entries,
                  "hits"_a = stats.hits, "misses"_a = stats.misses, "published"_a = stats.published,
                  "evicted"_a = stats.evicted, "refused"_a = stats.refused, "uptime_seconds"_a = stats.uptime_seconds,
                  "native_seconds_served"_a = stats.native_seconds_served, "daemon_pid"_a = stats.daemon_pid,
                  "daemon_rss"_a = stats.daemon_rss, "version"_a = stats.version);
}

void add_answers(py::module_& module) {
  py::class_<HeldLease>(module, "Lease", py::is_final()).def("release", &HeldLease::release);
  py::class_<Busy>(module, "Busy", py::is_final())
      .def_readonly("publishing", &Busy::publishing)
      .def_readonly("elapsed", &Busy::elapsed_seconds)
      .def_readonly("native_seconds", &Busy::native_seconds)
      .def_readonly("written", &Busy::written)
      .def_readonly("total", &Busy::total)
      .def_readonly("bytes_per_second", &Busy::bytes_per_second);
  py::class_<SharedPublication>(module, "Publication", py::is_final())
      .def_property_readonly("entry_id", &SharedPublication::entry_id)
      .def_property_readonly("failure", &SharedPublication::failure)
      .def("wait", &SharedPublication::wait, py::arg("timeout"));
}

}  // namespace

void add_config(py::module_& module) {
  py::class_<Config>(module, "Config", py::is_final())
      .def_readwrite("disabled", &Config::disabled)
      .def_readwrite("zygote", &Config::zygote)
      .def_readwrite("runtime_dir", &Config::runtime_dir)
      .def_readwrite("budget", &Config::budget)
      .def_readwrite("log_level", &Config::log_level)
      .def_readwrite("daemon_path", &Config::daemon_path)
      .def_readwrite("idle_exit_seconds", &Config::idle_exit_seconds)
      .def_property_readonly("instance_dir", &Config::instance_dir)
      .def_property_readonly("events_path", &Config::events_path)
      .def_property_readonly("log_path", &Config::log_path)
      .def_property_readonly("launcher_log_path", &Config::launcher_log_path);
  module.def("config", [] { return value_or_raise(Config::from_environment()); });
}

void add_client(py::module_& module) {
  add_answers(module);
  using py::arg;
  py::class_<Client, SharedClient>(module, "Client", py::is_final())
      .def(py::init([](const Config& config) { return std::make_shared<Client>(config); }), arg("config"))
      .def(
          "connect",
          [](const SharedClient& self, bool start) { check(unlocked([&] { return self->connect(start); })); },
          arg("start") = true)
      .def("lookup", &lookup, arg("key"), arg("lease") = true, arg("wait") = 0.0)
      .def(
          "used",
          [](const SharedClient& self, const std::string& entry_id) {
            const EntryId id = to_id(entry_id);
            unlocked([&] { self->used(id); });
          },
          arg("entry_id"))
      .def("publish", &publish, arg("lease"), py::kw_only(), arg("loader"), arg("target"), arg("native_seconds"),
           arg("meta"), arg("skeleton"), arg("tensors"), arg("buffers"), arg("inline_limit") = kInlineLimit)
      .def("list", &list)
      .def("stats", &stats)
      .def("open", &open, arg("entry_id"))
      .def(
          "drop",
          [](const SharedClient& self, const std::string& entry_id) {
            const EntryId id = to_id(entry_id);
            check(unlocked([&] { return self->drop(id); }));
          },
          arg("entry_id"))
      .def("drop_all",
           [](const SharedClient& self) { return value_or_raise(unlocked([&] { return self->drop_all(); })); })
      .def(
          "pin",
          [](const SharedClient& self, const std::string& entry_id, bool pinned) {
            const EntryId id = to_id(entry_id);
            check(unlocked([&] { return self->pin(id, pinned); }));
          },
          arg("entry_id"), arg("pinned"))
      .def("stop", [](const SharedClient& self) { check(unlocked([&] { return self->stop(); })); });
}

}  // namespace overmind
