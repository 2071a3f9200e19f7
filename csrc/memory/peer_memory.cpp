#include "memory/peer_memory.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "check.h"

namespace hybrid_ep::memory {

// Allocations below 2 MiB share a block, and IPC maps whole blocks.
constexpr int64_t kLeastBytes = 2 << 20;

namespace {

// What a rank tells its peers of its part.
struct Export {
    cudaIpcMemHandle_t part, marks;
    int first_mark;
    ProcessIdentity process;
};

// A part that peers may still map.
struct Kept {
    int device, rank;
    char* base;
    MarkRun marks;
    std::vector<ProcessIdentity> processes;
};
std::vector<Kept> kept_parts;
std::mutex kept_mutex;

bool may_be_mapped(const Kept& part) {
    std::vector<uint64_t> marks(part.processes.size());
    cudaError_t error = cudaMemcpy(marks.data(), address_of(part.marks),
                                   marks.size() * sizeof(uint64_t), cudaMemcpyDeviceToHost);
    if (error != cudaSuccess) return true;
    for (int peer = 0; peer < int(marks.size()); ++peer) {
        if (peer == part.rank || marks[peer] != 0) continue;
        if (!has_ended(part.processes[peer])) return true;
    }
    return false;
}

}  // namespace

void free_unread_parts() {
    std::lock_guard<std::mutex> lock(kept_mutex);
    if (kept_parts.empty()) return;  // perhaps there is no GPU to ask
    int before = 0;
    cudaGetDevice(&before);
    auto still_kept = [](Kept& part) {
        cudaSetDevice(part.device);
        if (may_be_mapped(part)) return true;
        cudaFree(part.base);
        give_back_marks(part.marks);
        return false;
    };
    auto end = std::partition(kept_parts.begin(), kept_parts.end(), still_kept);
    kept_parts.erase(end, kept_parts.end());
    cudaSetDevice(before);
    cudaGetLastError();
}

PeerMemory::PeerMemory(int rank, int num_ranks, int64_t bytes)
    : rank_(rank), num_ranks_(num_ranks), theirs_(num_ranks) {
    free_unread_parts();
    void* mine = nullptr;
    bytes = std::max(bytes, kLeastBytes);
    std::string what = "allocation of " + std::to_string(bytes) + " bytes of symmetric memory";
    check_cuda(cudaMalloc(&mine, bytes), what.c_str());
    peers_.base[rank] = static_cast<char*>(mine);
    try {
        check_cuda(cudaMemset(mine, 0, bytes), "zeroing symmetric memory");
        marks_ = take_marks(num_ranks);
        check_cuda(cudaDeviceSynchronize(), "zeroing symmetric memory");
    } catch (...) {
        free_now();
        throw;
    }
}

std::string PeerMemory::handle() {
    Export mine{};
    check_cuda(cudaIpcGetMemHandle(&mine.part, peers_.base[rank_]), "export of symmetric memory");
    mine.marks = ipc_handle_of(marks_);
    mine.first_mark = marks_.first;
    mine.process = this_process();
    is_exported_ = true;
    return std::string(reinterpret_cast<const char*>(&mine), sizeof(mine));
}

void PeerMemory::open(const std::vector<std::string>& handles) {
    std::vector<Export> exports(num_ranks_);
    for (int peer = 0; peer < num_ranks_; ++peer) {
        std::memcpy(&exports[peer], handles.at(peer).data(),
                    std::min(sizeof(Export), handles.at(peer).size()));
        processes_.push_back(exports[peer].process);
    }
    for (int peer = 0; peer < num_ranks_; ++peer) {
        if (peer == rank_) continue;
        const std::string whose = "mapping of rank " + std::to_string(peer) + "'s ";
        void *marks = nullptr, *theirs = nullptr;
        check_cuda(
            cudaIpcOpenMemHandle(&marks, exports[peer].marks, cudaIpcMemLazyEnablePeerAccess),
            (whose + "closing marks").c_str());
        theirs_[peer] = {static_cast<uint64_t*>(marks), exports[peer].first_mark};
        check_cuda(
            cudaIpcOpenMemHandle(&theirs, exports[peer].part, cudaIpcMemLazyEnablePeerAccess),
            (whose + "symmetric memory").c_str());
        peers_.base[peer] = static_cast<char*>(theirs);
    }
}

// Errors are not for a destructor to raise; a peer or CUDA itself may be gone.
void PeerMemory::unmap_peers() {
    const uint64_t mark = 1;
    for (int peer = 0; peer < num_ranks_; ++peer) {
        if (theirs_[peer].block == nullptr) continue;
        if (peers_.base[peer] != nullptr) cudaIpcCloseMemHandle(peers_.base[peer]);
        peers_.base[peer] = nullptr;
        cudaMemcpy(theirs_[peer].block + theirs_[peer].first + rank_, &mark, sizeof(mark),
                   cudaMemcpyHostToDevice);
    }
    // such a copy may return before it has arrived, and a peer that waited for this rank looks for
    // it
    cudaDeviceSynchronize();
    for (TheirMarks& marks : theirs_) {
        if (marks.block != nullptr) cudaIpcCloseMemHandle(marks.block);
        marks = {};
    }
}

void PeerMemory::close() {
    if (peers_.base[rank_] == nullptr) return;
    unmap_peers();
    if (!is_exported_) return free_now();
    int device = 0;
    cudaGetDevice(&device);
    processes_.resize(num_ranks_);
    {
        std::lock_guard<std::mutex> lock(kept_mutex);
        kept_parts.push_back({device, rank_, peers_.base[rank_], marks_, processes_});
    }
    peers_ = Peers{};
    free_unread_parts();
}

void PeerMemory::free_now() {
    unmap_peers();
    cudaFree(peers_.base[rank_]);
    give_back_marks(marks_);
    peers_ = Peers{};
}

}  // namespace hybrid_ep::memory
