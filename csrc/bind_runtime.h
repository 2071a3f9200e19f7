// What the runtimes of both modules show to Python alike.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <type_traits>

#include "check.h"
#include "runtime.h"

namespace hybrid_ep {

namespace py = pybind11;

using ChoicesTuple = std::tuple<uintptr_t, int, int64_t, int, int, int64_t, uintptr_t, int, int>;
using NewLayoutTuple = std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t>;
using SentTuple = std::tuple<uintptr_t, int64_t, int, uintptr_t, int64_t, uintptr_t, int64_t, int,
                             int, int, uintptr_t, int>;
using ReceivedTuple = std::tuple<uintptr_t, uintptr_t, uintptr_t, int64_t>;
using WeightedTuple = std::tuple<uintptr_t, uintptr_t, int>;
using SummedTuple = std::tuple<uintptr_t, int64_t, int, int, uintptr_t, uintptr_t, uintptr_t,
                               uintptr_t, int, uintptr_t, int>;

// A field as Python gives it, for a struct that wants a pointer, an enumerator or the number
// itself.
template <typename Number>
struct Field {
    Number number;

    operator Number() const { return number; }
    template <typename T>
    operator T*() const {
        return reinterpret_cast<T*>(number);
    }
    operator SumType() const { return SumType(number); }
};

template <typename Struct, typename Tuple>
Struct from(const Tuple& tuple) {
    return std::apply([](auto... numbers) { return Struct{Field<decltype(numbers)>{numbers}...}; },
                      tuple);
}

// Each module has types of its own, of one name: both may be loaded.
inline py::class_<RuntimeConfig> bind_config(py::module_& m) {
    return py::class_<RuntimeConfig>(m, "RuntimeConfig", py::module_local())
        .def(py::init([](const py::kwargs& given) {
            RuntimeConfig config{};
            config.each_field([&](const char* name, auto& field, bool is_needed = true) {
                if (given.contains(name)) {
                    field = py::cast<std::decay_t<decltype(field)>>(given[name]);
                } else if (is_needed) {
                    throw py::type_error(std::string("RuntimeConfig needs ") + name);
                }
            });
            return config;
        }));
}

inline bool is_interrupted() {
    py::gil_scoped_acquire held;
    return PyErr_CheckSignals() != 0;
}

// Blocks the thread, not Python: other threads run, and Ctrl-C is heard.
inline std::optional<std::vector<int32_t>> await_offsets(const Runtime& runtime, uint64_t ticket,
                                                         uintptr_t stream) {
    std::optional<std::vector<int32_t>> offsets;
    {
        py::gil_scoped_release released;
        offsets = runtime.await_offsets(ticket, stream, is_interrupted);
    }
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return offsets;
}

// How it is made, and its memory, are each module's.
inline py::class_<Runtime> bind_runtime(py::module_& m) {
    m.attr("SHARED_MEMORY") = layout::kBlockSmemBytes;
    m.def("shared_memory_per_block", &shared_memory_per_block);
    py::class_<FaultReport>(m, "FaultReport", py::module_local())
        .def_readonly("kind", &FaultReport::kind)
        .def_readonly("phase", &FaultReport::phase)
        .def_readonly("peer", &FaultReport::peer)
        .def_readonly("channel", &FaultReport::channel)
        .def_readonly("epoch", &FaultReport::epoch)
        .def_readonly("seen", &FaultReport::seen)
        .def_readonly("mine", &FaultReport::mine);
    return py::class_<Runtime>(m, "Runtime", py::module_local())
        .def("ipc_handle", [](Runtime& self) { return py::bytes(self.ipc_handle()); })
        .def("open_peers",
             [](Runtime& self, const std::vector<py::bytes>& handles) {
                 self.open_peers(std::vector<std::string>(handles.begin(), handles.end()));
             })
        .def("route",
             [](Runtime& self, const ChoicesTuple& choices, const NewLayoutTuple& layout,
                bool want_mail, uintptr_t stream) {
                 return self.route(from<Choices>(choices), from<NewLayout>(layout), want_mail,
                                   stream);
             })
        .def("publish", [](Runtime& self, const SentTuple& sent,
                           uintptr_t stream) { self.publish(from<Sent>(sent), stream); })
        .def("publish_fresh",
             [](Runtime& self, const ChoicesTuple& choices, const NewLayoutTuple& layout,
                const SentTuple& sent, uintptr_t stream) {
                 return self.publish_fresh(from<Choices>(choices), from<NewLayout>(layout),
                                           from<Sent>(sent), stream);
             })
        .def("pull", [](Runtime& self, const ReceivedTuple& received,
                        uintptr_t stream) { self.pull(from<Received>(received), stream); })
        .def("dispatch",
             [](Runtime& self, const SentTuple& sent, const ReceivedTuple& received,
                uintptr_t stream) {
                 self.dispatch(from<Sent>(sent), from<Received>(received), stream);
             })
        .def("dispatch_fresh",
             [](Runtime& self, const ChoicesTuple& choices, const NewLayoutTuple& layout,
                const SentTuple& sent, const ReceivedTuple& received, uintptr_t stream) {
                 self.dispatch_fresh(from<Choices>(choices), from<NewLayout>(layout),
                                     from<Sent>(sent), from<Received>(received), stream);
             })
        .def("combine", [](Runtime& self, const SummedTuple& summed,
                           uintptr_t stream) { self.combine(from<Summed>(summed), stream); })
        .def("combine_backward",
             [](Runtime& self, const SentTuple& sent, const ReceivedTuple& received,
                const WeightedTuple& weighted, uintptr_t stream) {
                 self.combine_backward(from<Sent>(sent), from<Received>(received),
                                       from<Weighted>(weighted), stream);
             })
        .def("destroy", &Runtime::destroy, py::call_guard<py::gil_scoped_release>())
        .def("await_offsets", &await_offsets)
        .def("give_up", &Runtime::give_up, py::call_guard<py::gil_scoped_release>())
        .def("num_routes", &Runtime::num_routes, py::call_guard<py::gil_scoped_release>())
        .def("fault", &Runtime::fault)
        .def("take_trace",
             [](Runtime& self) {
                 std::vector<std::tuple<int, int, uint32_t, uint64_t, uint64_t, int>> events;
                 for (const TraceEvent& e : self.take_trace()) {
                     events.emplace_back(e.span, e.block, e.epoch, e.begin_ns, e.end_ns, e.sm);
                 }
                 return events;
             })
        .def_property_readonly("is_half_made", &Runtime::is_half_made)
        .def_property_readonly("handle_words", &Runtime::handle_words)
        .def_property_readonly("symmetric_bytes", &Runtime::symmetric_bytes);
}

}  // namespace hybrid_ep
