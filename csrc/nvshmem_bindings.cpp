// hybrid_ep._nvshmem: the runtime of several nodes as Python sees it. Addresses and streams are
// integers. Its types are its own: hybrid_ep._nvlink may have some of the same name.
#include "bind_runtime.h"
#include "memory/peer_memory.h"
#include "network/nvshmem_heap.h"
#include "nodes_runtime.h"

using namespace hybrid_ep;
using kernels::several_nodes::kLaunchersOver;

namespace {

char* to_pointer(uintptr_t address) { return reinterpret_cast<char*>(address); }
uintptr_t to_address(const char* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

PYBIND11_MODULE(_nvshmem, m) {
    m.attr("MAX_NODE_RANKS") = layout::kMaxNodeRanks;
    m.attr("MAX_CHUNK_TOKENS") = layout::kMaxChunkTokens;
    m.attr("SHARED_MEMORY") = layout::kBlockSmemBytes;
    m.def("shared_memory_per_block", &shared_memory_per_block);

    bind_config<NodesConfig>(m)
        .def_property_readonly("symmetric_bytes",
                               [](const NodesConfig& self) { return self.layout().total_bytes; })
        .def_property_readonly("handle_words", [](const NodesConfig& self) {
            return layout::NodesHandleLayout::make(layout::HandleLayout::make(self.layout().world),
                                                   self.num_nodes)
                .num_words;
        });

    bind_fault_report(m);

    py::class_<NodesRuntime> runtime(m, "Runtime", py::module_local());
    runtime
        .def(py::init([](const NodesConfig& config, bool loopback) {
                 return new NodesRuntime(config, loopback
                                                     ? kLaunchersOver<network::LoopbackNetwork>
                                                     : kLaunchersOver<network::NvshmemNetwork>);
             }),
             py::arg("config"), py::arg("loopback") = false)
        .def("attach", &NodesRuntime::attach)
        .def("delay_puts", &NodesRuntime::delay_puts);
    bind_verbs(runtime);

    // For tests of the loopback, whose memory is mapped by CUDA IPC.
    py::class_<memory::PeerMemory>(m, "PeerMemory", py::module_local())
        .def(py::init([](const NodesConfig& config) {
            const layout::NodesLayout nodes = config.layout();
            layout::BufferLayout whole = nodes.world;
            whole.total_bytes = nodes.total_bytes;
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
    m.def("complete_puts", &kernels::several_nodes::complete_puts,
          py::call_guard<py::gil_scoped_release>());
    m.def("mapped", [](uintptr_t mine, int rank) {
        return to_address(network::mapped_symmetric(to_pointer(mine), rank));
    });
}
