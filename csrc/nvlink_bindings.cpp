// hybrid_ep._nvlink: the runtime as Python sees it. Addresses and streams are integers.
#include "bind_runtime.h"
#include "runtime.h"

using namespace hybrid_ep;

PYBIND11_MODULE(_nvlink, m) {
    m.attr("MAX_RANKS") = layout::kMaxRanks;
    m.attr("MAX_TOPK") = layout::kMaxTopk;
    m.attr("SHARED_MEMORY") = layout::kBlockSmemBytes;
    m.def("tokens_by_sms", &tokens_by_sms);
    m.def("shared_memory_per_block", &shared_memory_per_block);

    bind_config<RuntimeConfig>(m);
    bind_fault_report(m);

    py::class_<Runtime> runtime(m, "Runtime", py::module_local());
    runtime.def(py::init<const RuntimeConfig&>())
        .def("ipc_handle", [](Runtime& self) { return py::bytes(self.ipc_handle()); })
        .def("open_peers",
             [](Runtime& self, const std::vector<py::bytes>& handles) {
                 self.open_peers(std::vector<std::string>(handles.begin(), handles.end()));
             })
        .def("unmap_peers", &Runtime::unmap_peers)
        .def("free_now", &Runtime::free_now)
        .def("copy_peer", &Runtime::copy_peer);
    bind_verbs(runtime);

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
