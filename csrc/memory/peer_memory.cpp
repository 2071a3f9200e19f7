#include "memory/peer_memory.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "check.h"

namespace hybrid_ep::memory {

// Allocations below 2 MiB share a block, and IPC maps whole blocks.
constexpr int64_t kLeastBytes = 2 << 20;

namespace {

// A part that peers may still read.
struct Kept {
    int device;
    char* base;
    layout::BufferLayout layout;
    int rank;
};
std::vector<Kept> kept_parts;
std::mutex kept_mutex;

bool all_peers_closed(const Kept& part) {
    std::vector<uint64_t> marks(part.layout.num_ranks);
    cudaError_t error = cudaMemcpy(marks.data(), part.base + part.layout.closed_flag(0),
                                   marks.size() * sizeof(uint64_t), cudaMemcpyDeviceToHost);
    if (error != cudaSuccess) return false;
    for (int peer = 0; peer < part.layout.num_ranks; ++peer) {
        if (peer != part.rank && marks[peer] == 0) return false;
    }
    return true;
}

}  // namespace

void free_unread_parts() {
    std::lock_guard<std::mutex> lock(kept_mutex);
    if (kept_parts.empty()) return;  // perhaps there is no GPU to ask
    int before = 0;
    cudaGetDevice(&before);
    auto still_read = [](const Kept& part) {
        cudaSetDevice(part.device);
        if (!all_peers_closed(part)) return true;
        cudaFree(part.base);
        return false;
    };
    auto end = std::partition(kept_parts.begin(), kept_parts.end(), still_read);
    kept_parts.erase(end, kept_parts.end());
    cudaSetDevice(before);
    cudaGetLastError();
}

PeerMemory::PeerMemory(int rank, const layout::BufferLayout& layout)
    : rank_(rank), layout_(layout) {
    free_unread_parts();
    void* mine = nullptr;
    const int64_t bytes = std::max(layout.total_bytes, kLeastBytes);
    std::string what = "allocation of " + std::to_string(bytes) + " bytes of symmetric memory";
    check_cuda(cudaMalloc(&mine, bytes), what.c_str());
    peers_.base[rank] = static_cast<char*>(mine);
    check_cuda(cudaMemset(mine, 0, bytes), "zeroing symmetric memory");
    check_cuda(cudaDeviceSynchronize(), "zeroing symmetric memory");
}

PeerMemory::~PeerMemory() { close(); }

std::string PeerMemory::handle() const {
    cudaIpcMemHandle_t handle;
    check_cuda(cudaIpcGetMemHandle(&handle, peers_.base[rank_]), "export of symmetric memory");
    return std::string(reinterpret_cast<const char*>(&handle), sizeof(handle));
}

void PeerMemory::open(const std::vector<std::string>& handles) {
    for (int peer = 0; peer < layout_.num_ranks; ++peer) {
        if (peer == rank_) continue;
        cudaIpcMemHandle_t handle;
        std::memcpy(&handle, handles.at(peer).data(), sizeof(handle));
        void* theirs = nullptr;
        std::string what = "mapping of rank " + std::to_string(peer) + "'s symmetric memory";
        check_cuda(cudaIpcOpenMemHandle(&theirs, handle, cudaIpcMemLazyEnablePeerAccess),
                   what.c_str());
        peers_.base[peer] = static_cast<char*>(theirs);
    }
}

void PeerMemory::close() {
    if (peers_.base[rank_] == nullptr) return;
    // errors are not for a destructor to raise; a peer or CUDA itself may be gone
    const uint64_t mark = 1;
    for (int peer = 0; peer < layout_.num_ranks; ++peer) {
        if (peer == rank_ || peers_.base[peer] == nullptr) continue;
        cudaMemcpy(peers_.base[peer] + layout_.closed_flag(rank_), &mark, sizeof(mark),
                   cudaMemcpyHostToDevice);
    }
    // such a copy may return before it has arrived, and whoever waited for this rank looks for it
    cudaDeviceSynchronize();
    for (int peer = 0; peer < layout_.num_ranks; ++peer) {
        if (peer == rank_ || peers_.base[peer] == nullptr) continue;
        cudaIpcCloseMemHandle(peers_.base[peer]);
    }
    int device = 0;
    cudaGetDevice(&device);
    {
        std::lock_guard<std::mutex> lock(kept_mutex);
        kept_parts.push_back({device, peers_.base[rank_], layout_, rank_});
    }
    peers_ = Peers{};
    free_unread_parts();
}

}  // namespace hybrid_ep::memory
