// hybrid_ep._nvlink: the runtime as Python sees it. Addresses and streams are integers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "runtime.h"

namespace py = pybind11;
using namespace hybrid_ep;

PYBIND11_MODULE(_nvlink, m) {
    m.attr("MAX_RANKS") = layout::kMaxRanks;
    m.attr("MAX_TOPK") = layout::kMaxTopk;

    py::class_<RuntimeConfig>(m, "RuntimeConfig")
        .def(py::init([](int device, int rank, int num_ranks, int num_experts, int max_tokens,
                         int topk, int row_capacity, int inbox_row_bytes, int num_sms_publish,
                         int num_sms_dispatch, int num_sms_combine, int slice_bytes,
                         double timeout_s, bool trace) {
                 return RuntimeConfig{device,          rank,
                                      num_ranks,       num_experts,
                                      max_tokens,      topk,
                                      row_capacity,    inbox_row_bytes,
                                      num_sms_publish, num_sms_dispatch,
                                      num_sms_combine, slice_bytes,
                                      timeout_s,       trace};
             }),
             py::kw_only(), py::arg("device"), py::arg("rank"), py::arg("num_ranks"),
             py::arg("num_experts"), py::arg("max_tokens"), py::arg("topk"),
             py::arg("row_capacity"), py::arg("inbox_row_bytes"), py::arg("num_sms_publish"),
             py::arg("num_sms_dispatch"), py::arg("num_sms_combine"), py::arg("slice_bytes"),
             py::arg("timeout_s"), py::arg("trace"));

    py::class_<FaultReport>(m, "FaultReport")
        .def_readonly("kind", &FaultReport::kind)
        .def_readonly("phase", &FaultReport::phase)
        .def_readonly("peer", &FaultReport::peer)
        .def_readonly("channel", &FaultReport::channel)
        .def_readonly("epoch", &FaultReport::epoch)
        .def_readonly("seen", &FaultReport::seen);

    py::class_<Runtime>(m, "Runtime")
        .def(py::init<const RuntimeConfig&>())
        .def("ipc_handle", [](const Runtime& self) { return py::bytes(self.ipc_handle()); })
        .def("open_peers",
             [](Runtime& self, const std::vector<py::bytes>& handles) {
                 self.open_peers(std::vector<std::string>(handles.begin(), handles.end()));
             })
        .def("destroy", &Runtime::destroy, py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("handle_words", &Runtime::handle_words)
        .def_property_readonly("symmetric_bytes", &Runtime::symmetric_bytes)
        .def("route", &Runtime::route)
        .def("publish", &Runtime::publish)
        .def("pull", &Runtime::pull)
        .def("dispatch", &Runtime::dispatch)
        .def("dispatch_fresh", &Runtime::dispatch_fresh)
        .def("combine", &Runtime::combine)
        .def("copy_peer", &Runtime::copy_peer)
        .def("required_rows", &Runtime::required_rows, py::call_guard<py::gil_scoped_release>())
        .def("fault", &Runtime::fault)
        .def("take_trace", [](Runtime& self) {
            std::vector<std::tuple<int, int, uint32_t, uint64_t, uint64_t>> events;
            for (const TraceEvent& e : self.take_trace()) {
                events.emplace_back(e.span, e.block, e.epoch, e.begin_ns, e.end_ns);
            }
            return events;
        });

    m.def("free_unread_memory", &memory::free_unread_parts,
          py::call_guard<py::gil_scoped_release>());

    // Sizes without a GPU, for `plan` and its test.
    m.def("symmetric_bytes", [](int num_ranks, int num_experts, int max_tokens, int topk,
                                int row_capacity, int inbox_row_bytes) {
        return layout::BufferLayout::make(num_ranks, num_experts, max_tokens, topk, row_capacity,
                                          inbox_row_bytes)
            .total_bytes;
    });
    m.def("handle_words", [](int num_ranks, int num_experts, int max_tokens, int topk) {
        return layout::HandleLayout::make(
                   layout::BufferLayout::make(num_ranks, num_experts, max_tokens, topk, 16, 16))
            .num_words;
    });
}
