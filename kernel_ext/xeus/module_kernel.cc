// SPDX-License-Identifier: MIT
// overmind._kernel: a kernel's channels as Python sees them. Types and contracts in _kernel.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernel_ext/xeus/channels.h"
#include "kernel_ext/xeus/murmur.h"

namespace overmind::kernel {
namespace py = pybind11;
namespace {

// A message that came in, where, and whether it was answered.
struct Request {
  MessagePtr message;
  Channel channel;
  bool replied = false;
};

py::bytes as_bytes(const std::string& text) { return {text.data(), text.size()}; }

std::string text_of(const py::handle& object) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(object.ptr(), &data, &size) != 0) throw py::error_already_set();
  return {data, static_cast<std::size_t>(size)};
}

// Any object with the buffer protocol; copied, because it is sent after the call returned.
std::vector<std::string> buffers_of(const py::object& objects) {
  std::vector<std::string> buffers;
  if (objects.is_none()) return buffers;
  for (const py::handle object : objects) {
    const py::bytes flat = py::reinterpret_steal<py::bytes>(PyBytes_FromObject(object.ptr()));
    if (!flat) throw py::error_already_set();
    buffers.push_back(text_of(flat));
  }
  return buffers;
}

py::list buffers_to_python(const Request& request) {
  py::list result;
  for (const std::string& buffer : request.message->buffers) result.append(py::memoryview(as_bytes(buffer)));
  return result;
}

MessagePtr shared_parent_of(const Request* request) { return request == nullptr ? nullptr : request->message; }

// Clients find free ports by binding and letting go of them: one that looks for some holds ours for a moment, and so
// does a kernel that was killed a moment ago.
constexpr auto kPatience = std::chrono::seconds(1);
constexpr auto kPause = std::chrono::milliseconds(10);

std::unique_ptr<Channels> bound_channels(const Connection& connection, const std::string& username) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (true) {
    try {
      return std::make_unique<Channels>(connection, username);
    } catch (const zmq::error_t& error) {
      if (error.num() != EADDRINUSE || std::chrono::steady_clock::now() > deadline) throw;
    }
    std::this_thread::sleep_for(kPause);
  }
}

std::unique_ptr<Channels> make_channels(const py::dict& file, const std::string& username) {
  Connection connection;
  connection.transport = py::cast<std::string>(file["transport"]);
  connection.ip = py::cast<std::string>(file["ip"]);
  connection.key = py::cast<std::string>(file["key"]);
  connection.scheme = py::cast<std::string>(file["signature_scheme"]);
  connection.shell_port = py::cast<int>(file["shell_port"]);
  connection.control_port = py::cast<int>(file["control_port"]);
  connection.stdin_port = py::cast<int>(file["stdin_port"]);
  connection.iopub_port = py::cast<int>(file["iopub_port"]);
  connection.hb_port = py::cast<int>(file["hb_port"]);
  try {
    return bound_channels(connection, username);
  } catch (const zmq::error_t& error) {
    throw py::value_error("the kernel's sockets could not be bound at " + connection.transport + "://" + connection.ip +
                          ": " + error.what());
  }
}

py::dict ports_of(Channels& self) {
  const Connection connection = self.connection();
  py::dict ports;
  ports["shell_port"] = connection.shell_port;
  ports["control_port"] = connection.control_port;
  ports["stdin_port"] = connection.stdin_port;
  ports["iopub_port"] = connection.iopub_port;
  ports["hb_port"] = connection.hb_port;
  return ports;
}

void start(Channels& self, py::function on_control, int parent_pid) {
  // The function dies with the Control, on a thread that may not hold the GIL.
  const std::shared_ptr<py::function> shared(new py::function(std::move(on_control)), [](py::function* function) {
    const py::gil_scoped_acquire gil;
    delete function;
  });
  const auto handler = [shared](MessagePtr message) {
    const py::gil_scoped_acquire gil;
    try {
      (*shared)(Request{std::move(message), Channel::kControl, false});
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("a request on the control channel");
    }
  };
  self.start(handler, parent_pid);
}

std::optional<Request> receive(Channels& self) {
  auto message = self.server().read_shell();
  if (!message) return std::nullopt;
  return Request{std::make_shared<const Message>(std::move(*message)), Channel::kShell, false};
}

void reply(Channels& self, Request& request, const std::string& msg_type, const py::bytes& content,
           const py::bytes& metadata, const py::object& buffers) {
  if (request.channel == Channel::kControl && !self.is_control_thread())
    throw std::runtime_error("a control request is answered on the control thread");
  std::vector<std::string> copies = buffers_of(buffers);
  // No step of Python's between the two: nothing can be raised there that would make one answer none, or two.
  if (request.replied) return;
  self.reply(request.channel, *request.message, msg_type, text_of(metadata), text_of(content), std::move(copies));
  request.replied = true;
}

void publish(Channels& self, const std::string& msg_type, const py::bytes& content, const Request* parent,
             const py::bytes& metadata, const py::object& buffers, const std::string& topic) {
  if (self.is_forked()) return;  // a forked child has no way to iopub: as with ipykernel, its displays are lost
  std::vector<std::string> copies = buffers_of(buffers);
  std::string metadata_text = text_of(metadata);
  std::string content_text = text_of(content);
  const std::string prefixed = topic.empty() ? "kernel." + self.session().id() + "." + msg_type : topic;
  const MessagePtr kept = shared_parent_of(parent);
  const py::gil_scoped_release released;
  self.publisher().publish(prefixed, msg_type, kept.get(), std::move(metadata_text), std::move(content_text),
                           std::move(copies));
}

py::bytes ask(Channels& self, const Request& request, const py::bytes& content) {
  const MessagePtr kept = request.message;
  std::string content_text = text_of(content);
  std::string answer;
  {
    const py::gil_scoped_release released;
    answer = self.ask(*kept, std::move(content_text),
                      [] {
                        const py::gil_scoped_acquire gil;
                        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
                      })
                 .content;
  }
  return as_bytes(answer);
}

// Returns false in a forked child: the caller writes to the descriptor instead.
bool write(Channels& self, int stream, const py::str& text, const Request* parent) {
  if (self.is_forked()) return false;
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  py::object encoded;
  if (data == nullptr) {  // surrogates: the client gets replacement characters
    PyErr_Clear();
    encoded = text.attr("encode")("utf-8", "replace");
    data = PyBytes_AS_STRING(encoded.ptr());
    size = PyBytes_GET_SIZE(encoded.ptr());
  }
  // May send, and so wait for another thread that sends: but never for one that wants the GIL.
  self.output().write(stream == 0 ? Stream::kStdout : Stream::kStderr, {data, static_cast<std::size_t>(size)},
                      shared_parent_of(parent));
  return true;
}

void add_request(py::module_& module) {
  py::class_<Request>(module, "Request")
      .def_property_readonly("header", [](const Request& self) { return as_bytes(self.message->header); })
      .def_property_readonly("parent_header", [](const Request& self) { return as_bytes(self.message->parent_header); })
      .def_property_readonly("metadata", [](const Request& self) { return as_bytes(self.message->metadata); })
      .def_property_readonly("content", [](const Request& self) { return as_bytes(self.message->content); })
      .def_property_readonly("buffers", &buffers_to_python)
      .def_property_readonly("identities",
                             [](const Request& self) {
                               py::list result;
                               for (const std::string& identity : self.message->identities)
                                 result.append(as_bytes(identity));
                               return result;
                             })
      .def_readonly("replied", &Request::replied)
      .def_property_readonly("channel",
                             [](const Request& self) { return self.channel == Channel::kShell ? "shell" : "control"; });
}

void add_channels(py::module_& module) {
  const auto released = py::call_guard<py::gil_scoped_release>();
  py::class_<Channels>(module, "Channels")
      .def(py::init(&make_channels), py::arg("connection"), py::arg("username"))
      .def_property_readonly("ports", &ports_of)
      .def_property_readonly("session", [](Channels& self) { return self.session().id(); })
      .def_property_readonly("shell_fd", [](Channels& self) { return self.server().shell_fd(); })
      .def("start", &start, py::arg("on_control"), py::arg("parent_pid"))
      .def("stop_control", &Channels::stop_control, released)
      .def("capture_descriptors", &Channels::capture_descriptors, released)
      .def("release_descriptors", &Channels::release_descriptors, released)
      .def("original_descriptor",
           [](Channels& self, int stream) {
             return self.original_descriptor(stream == 0 ? Stream::kStdout : Stream::kStderr);
           })
      .def("receive", &receive)
      .def("reply", &reply, py::arg("request"), py::arg("msg_type"), py::arg("content"),
           py::arg("metadata") = py::bytes("{}"), py::arg("buffers") = py::none())
      .def("publish", &publish, py::arg("msg_type"), py::arg("content"), py::arg("parent") = nullptr,
           py::arg("metadata") = py::bytes("{}"), py::arg("buffers") = py::none(), py::arg("topic") = "")
      .def(
          "status",
          [](Channels& self, const std::string& state, const Request* parent) {
            const MessagePtr kept = shared_parent_of(parent);
            const py::gil_scoped_release no_gil;
            self.publisher().status(state, kept.get());
          },
          py::arg("state"), py::arg("parent") = nullptr)
      .def("ask", &ask, py::arg("request"), py::arg("content"))
      .def("write", &write, py::arg("stream"), py::arg("text"), py::arg("parent"))
      .def(
          "set_parent",
          [](Channels& self, const Request* parent) { self.output().set_parent(shared_parent_of(parent)); },
          py::arg("parent"))
      .def("flush", &Channels::flush, released);
}

}  // namespace

PYBIND11_MODULE(_kernel, module) {
  module.doc() = "A Jupyter kernel's channels, over xeus.";
  module.attr("XEUS_VERSION") = xeus_version();
  module.def("murmur2", &murmur2, py::arg("text"), py::arg("seed"));
  add_request(module);
  add_channels(module);
}

}  // namespace overmind::kernel
