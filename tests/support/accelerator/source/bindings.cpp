// Bindings: what Python sets and asks of the device beside PyTorch's own interface.
#include "device.h"
#include "kernels.h"
#include "memory.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Generator.h>

#include <thread>

namespace py = pybind11;

PYBIND11_MAKE_OPAQUE(sim::Graph)

namespace {

sim::Stream& found(c10::DeviceIndex device, c10::StreamId id) {
  return sim::stream(device, id);
}

void use(c10::DeviceIndex device, c10::StreamId id) {
  sim::exchange_stream(found(device, id));
}

py::object generator(c10::DeviceIndex device) {
  // A wrapper borrows the generator, which lives as long as the process.
  return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(sim::default_generator(device)));
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("devices") = static_cast<int>(sim::kDevices);
  m.def("start_device", &sim::start_device, py::call_guard<py::gil_scoped_release>());
  m.def("halt", &sim::halt);
  m.def("forked", &sim::forked);

  m.def("current_device", &sim::current_device);
  m.def("exchange_device", &sim::exchange_device);
  m.def("current_stream", [](c10::DeviceIndex device) { return sim::current_stream(device).id; });
  m.def("use_stream", &use);
  m.def("synchronize", [](c10::DeviceIndex device) { sim::synchronize(device); });
  m.def("sleep", [](c10::DeviceIndex device, c10::StreamId id, double seconds) {
    found(device, id).enqueue(
        [seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }, false);
  });
  m.def("generator", &generator);

  m.def("elapsed_ms", [](size_t begin, size_t end) {
    return sim::elapsed_ms(reinterpret_cast<void*>(begin), reinterpret_cast<void*>(end));
  });

  py::class_<sim::Graph, sim::GraphPtr>(m, "Graph").def("__len__", [](const sim::Graph& graph) { return graph.size(); });
  m.attr("first_of_graphs") = sim::kPool + 1;
  m.attr("last_of_graphs") = sim::kPool + sim::kGraphs;
  m.def("begin_capture", [](c10::DeviceIndex device, c10::StreamId id) { return sim::begin_capture(found(device, id)); });
  m.def("replay", [](const sim::GraphPtr& graph, c10::DeviceIndex device, c10::StreamId id) {
    sim::replay(graph, found(device, id));
  });
  m.def("forbid_waits", &sim::forbid_waits);
  m.def("end_capture", &sim::end_capture);
  m.def("captured", [](c10::DeviceIndex device, c10::StreamId id) { return found(device, id).captured.load(); });

  m.def("set_limit", py::overload_cast<c10::DeviceIndex, size_t>(&sim::limit));
  m.def("get_limit", py::overload_cast<c10::DeviceIndex>(&sim::limit));
  m.def("set_fraction", py::overload_cast<c10::DeviceIndex, double>(&sim::fraction));
  m.def("get_fraction", py::overload_cast<c10::DeviceIndex>(&sim::fraction));
  m.def("set_poison", &sim::poison);
  m.def("host_register", [](size_t at, size_t nbytes) { sim::host_register(reinterpret_cast<void*>(at), nbytes); });
  m.def("host_unregister", [](size_t at) { sim::host_unregister(reinterpret_cast<void*>(at)); });

  m.def("set_link_in", [](c10::DeviceIndex device, double bytes_per_s, double latency_s) {
    sim::link_in(device).set(bytes_per_s, latency_s);
  });
  m.def("set_link_out", [](c10::DeviceIndex device, double bytes_per_s, double latency_s) {
    sim::link_out(device).set(bytes_per_s, latency_s);
  });
  m.def("carried_in", [](c10::DeviceIndex device) {
    return std::pair(sim::link_in(device).copies(), sim::link_in(device).bytes());
  });
  m.def("carried_out", [](c10::DeviceIndex device) {
    return std::pair(sim::link_out(device).copies(), sim::link_out(device).bytes());
  });
  m.def("set_delays", &sim::delays);
  m.def("hold", [](c10::DeviceIndex device, c10::StreamId id) { return sim::hold(found(device, id)); });
  m.def("release", &sim::release);
  m.def("counts", &sim::counts);
}
