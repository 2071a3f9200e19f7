// hybrid_ep._nvshmem: the runtime of several nodes as Python sees it. Addresses and streams are
// integers. Its types are its own: hybrid_ep._nvlink may have some of the same name.
#include "bind_runtime.h"
#include "kernels/delaying_card.h"
#include "kernels/loading.h"
#include "kernels/several_nodes.h"
#include "network/nvshmem_heap.h"
#include "preconditions.h"

using namespace hybrid_ep;
using kernels::several_nodes::kLaunchersOver;

namespace {

// A term of a sum may be anywhere in the memory.
constexpr Target kNvshmem{context_of_several_nodes, kLaunchersOver<network::NvshmemNetwork>,
                          /*owns_memory*/ false, /*may_use_copy_engine*/ false, kMostTermBytes};
// For tests.
constexpr Target kLoopback{context_of_several_nodes, beside_card<network::LoopbackNetwork>(),
                           /*owns_memory*/ true, /*may_use_copy_engine*/ false, kMostTermBytes};

char* to_pointer(uintptr_t address) { return reinterpret_cast<char*>(address); }
uintptr_t to_address(const char* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

PYBIND11_MODULE(_nvshmem, m) {
    using namespace kernels::several_nodes;
    m.attr("MAX_NODE_RANKS") = layout::kMaxNodeRanks;
    m.attr("MAX_CHUNK_TOKENS") = layout::kMaxChunkTokens;
    m.attr("LEAST_SMS") = py::dict(py::arg("num_sms_dispatch") = kDispatchRoles,
                                   py::arg("num_sms_combine") = kCombineRoles);

    bind_config(m)
        .def_property_readonly("symmetric_bytes",
                               [](const RuntimeConfig& self) {
                                   return context_of_several_nodes(self).nodes.total_bytes;
                               })
        .def_property_readonly("handle_words", [](const RuntimeConfig& self) {
            return context_of_several_nodes(self).kept.num_words;
        });
    bind_runtime(m)
        .def(py::init([](const RuntimeConfig& config, bool loopback) {
                 return new Runtime(config, loopback ? kLoopback : kNvshmem);
             }),
             py::arg("config"), py::arg("loopback") = false)
        .def("attach", &Runtime::attach)
        .def("delay_puts", [](Runtime& self, int most_us) {
            const DeviceGuard guard(self.config().device);
            auto card = std::make_shared<DelayingCard>(most_us);
            self.post_puts(card->queue(), card);
        });

    m.def("num_kernels", &kernels::num_kernels);
    m.def("built_version", &network::nvshmem_built_version);
    m.def("loaded_version", &network::nvshmem_loaded_version);
    m.def("unique_id", [] { return py::bytes(network::nvshmem_unique_id()); });
    m.def("start", &network::start_nvshmem, py::call_guard<py::gil_scoped_release>());
    m.def(
        "allocate", [](int64_t bytes) { return to_address(network::allocate_symmetric(bytes)); },
        py::call_guard<py::gil_scoped_release>());
    m.def(
        "free", [](uintptr_t address) { network::free_symmetric(to_pointer(address)); },
        py::call_guard<py::gil_scoped_release>());
    m.def("complete_puts", &complete_puts, py::call_guard<py::gil_scoped_release>());
    m.def("mapped", [](uintptr_t mine, int rank) {
        return to_address(network::mapped_symmetric(to_pointer(mine), rank));
    });
}
