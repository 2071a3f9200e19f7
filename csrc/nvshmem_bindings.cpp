// hybrid_ep._nvshmem: the runtime of several nodes as Python sees it. Addresses and streams are
// integers. Its types are its own: hybrid_ep._nvlink may have some of the same name.
#include "bind_verbs.h"
#include "kernels/loopback.h"
#include "kernels/nvshmem.h"
#include "memory/nvshmem_heap.h"
#include "memory/peer_memory.h"
#include "network_runtime.h"

using namespace hybrid_ep;

namespace {

NetworkConfig make_config(int device, int rank, int num_nodes, int ranks_per_node, int num_experts,
                          int max_tokens, int topk, int row_capacity, int inbox_row_bytes,
                          int chunk_tokens, int window, int num_sms_publish, int num_sms_dispatch,
                          int num_sms_combine, int num_sms_send, int slice_bytes, double timeout_s,
                          int64_t num_routes, int64_t layout_base, bool trace, bool uses_mapped) {
    return {device,
            rank,
            num_nodes,
            ranks_per_node,
            num_experts,
            max_tokens,
            topk,
            row_capacity,
            inbox_row_bytes,
            chunk_tokens,
            window,
            num_sms_publish,
            num_sms_dispatch,
            num_sms_combine,
            num_sms_send,
            slice_bytes,
            timeout_s,
            num_routes,
            layout_base,
            trace,
            uses_mapped};
}

char* to_pointer(uintptr_t address) { return reinterpret_cast<char*>(address); }
uintptr_t to_address(const char* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

PYBIND11_MODULE(_nvshmem, m) {
    m.attr("MAX_NODE_RANKS") = layout::kMaxNodeRanks;
    m.attr("MAX_CHUNK_TOKENS") = layout::kMaxChunkTokens;
    m.attr("SHARED_MEMORY") = layout::kBlockSmemBytes;
    m.def("shared_memory_per_block", &shared_memory_per_block);

    py::class_<NetworkConfig>(m, "NetworkConfig", py::module_local())
        .def(py::init(&make_config), py::kw_only(), py::arg("device"), py::arg("rank"),
             py::arg("num_nodes"), py::arg("ranks_per_node"), py::arg("num_experts"),
             py::arg("max_tokens"), py::arg("topk"), py::arg("row_capacity"),
             py::arg("inbox_row_bytes"), py::arg("chunk_tokens"), py::arg("window"),
             py::arg("num_sms_publish"), py::arg("num_sms_dispatch"), py::arg("num_sms_combine"),
             py::arg("num_sms_send"), py::arg("slice_bytes"), py::arg("timeout_s"),
             py::arg("num_routes"), py::arg("layout_base"), py::arg("trace"),
             py::arg("uses_mapped") = true)
        .def_property_readonly("symmetric_bytes",
                               [](const NetworkConfig& self) { return self.layout().total_bytes; })
        .def_property_readonly("handle_words", [](const NetworkConfig& self) {
            return layout::RelayHandleLayout::make(layout::HandleLayout::make(self.layout().world),
                                                   self.num_nodes)
                .num_words;
        });

    bind_fault_report(m);

    py::class_<NetworkRuntime> runtime(m, "NetworkRuntime", py::module_local());
    runtime
        .def(py::init([](const NetworkConfig& config, bool loopback) {
                 return new NetworkRuntime(
                     config, loopback ? kernels::kLoopbackKernels : kernels::kNvshmemKernels);
             }),
             py::arg("config"), py::arg("loopback") = false)
        .def("attach", &NetworkRuntime::attach)
        .def("delay_puts", &NetworkRuntime::delay_puts);
    bind_verbs(runtime);

    // For tests of the loopback, whose memory is mapped by CUDA IPC.
    py::class_<memory::PeerMemory>(m, "PeerMemory", py::module_local())
        .def(py::init([](const NetworkConfig& config) {
            const layout::RelayLayout relay = config.layout();
            layout::BufferLayout whole = relay.world;
            whole.total_bytes = relay.total_bytes;
            return new memory::PeerMemory(config.rank, whole);
        }))
        .def("handle", [](memory::PeerMemory& self) { return py::bytes(self.handle()); })
        .def("open",
             [](memory::PeerMemory& self, const std::vector<py::bytes>& handles) {
                 self.open(std::vector<std::string>(handles.begin(), handles.end()));
             })
        .def("address", [](const memory::PeerMemory& self,
                           int rank) { return to_address(self.peers().base[rank]); })
        .def("close", &memory::PeerMemory::close);

    m.def("built_version", &memory::nvshmem_built_version);
    m.def("loaded_version", &memory::nvshmem_loaded_version);
    m.def("unique_id", [] { return py::bytes(memory::nvshmem_unique_id()); });
    m.def("start", &memory::start_nvshmem, py::call_guard<py::gil_scoped_release>());
    m.def(
        "allocate", [](int64_t bytes) { return to_address(memory::allocate_symmetric(bytes)); },
        py::call_guard<py::gil_scoped_release>());
    m.def(
        "free", [](uintptr_t address) { memory::free_symmetric(to_pointer(address)); },
        py::call_guard<py::gil_scoped_release>());
    m.def("complete_puts", &memory::complete_puts, py::call_guard<py::gil_scoped_release>());
    m.def("mapped", [](uintptr_t mine, int rank) {
        return to_address(memory::mapped_symmetric(to_pointer(mine), rank));
    });
}
