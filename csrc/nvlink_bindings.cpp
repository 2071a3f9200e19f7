// hybrid_ep._nvlink: the runtime as Python sees it. Addresses and streams are integers.
#include "bind_runtime.h"
#include "kernels/loading.h"
#include "kernels/maps.h"
#include "one_node.h"

using namespace hybrid_ep;

namespace {

using MapToTopkTuple = std::tuple<uintptr_t, int64_t, int64_t, uintptr_t, int64_t, int64_t, int,
                                  int, int, uintptr_t, uintptr_t, uintptr_t, int>;
using TopkToDenseTuple = std::tuple<uintptr_t, uintptr_t, int, int, int, int, uintptr_t>;

}  // namespace

PYBIND11_MODULE(_nvlink, m) {
    m.attr("MAX_RANKS") = layout::kMaxRanks;
    m.attr("MAX_TOPK") = layout::kMaxTopk;
    m.def("tokens_by_sms", &tokens_by_sms);

    bind_config(m);
    bind_runtime(m)
        .def(py::init([](const RuntimeConfig& config) { return new Runtime(config, kOneNode); }))
        .def("unmap_peers", &Runtime::unmap_peers)
        .def("free_now", &Runtime::free_now)
        .def("copy_peer", &Runtime::copy_peer);

    m.def("free_unread_memory", &memory::free_unread_parts,
          py::call_guard<py::gil_scoped_release>());

    // Of no Buffer; on the current device.
    m.def(
        "load_kernels",
        [](int device) {
            const DeviceGuard guard(device);
            kernels::load_kernels();
        },
        py::call_guard<py::gil_scoped_release>());
    m.def("num_kernels", &kernels::num_kernels);
    m.def("map_to_topk", [](const MapToTopkTuple& p, uintptr_t stream) {
        kernels::launch_map_to_topk(from<kernels::MapToTopkParams>(p),
                                    reinterpret_cast<cudaStream_t>(stream));
    });
    m.def("topk_to_dense", [](const TopkToDenseTuple& p, uintptr_t stream) {
        kernels::launch_topk_to_dense(from<kernels::TopkToDenseParams>(p),
                                      reinterpret_cast<cudaStream_t>(stream));
    });

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
