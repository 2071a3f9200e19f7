#include "memory/closing_marks.h"

#include <mutex>
#include <vector>

#include "check.h"

namespace hybrid_ep::memory {
namespace {

// CUDA IPC maps whole blocks of 2 MiB, so smaller allocations would share one with strangers.
constexpr int kBlockBytes = 2 << 20, kMarks = kBlockBytes / 8;

struct Block {
    int device;
    uint64_t* base;
    cudaIpcMemHandle_t handle;
    std::vector<MarkRun> free;  // given back, to be taken by Buffers of as many ranks
    int used = 0;               // marks that have ever been taken
};
std::vector<Block> blocks;  // never freed
std::mutex blocks_mutex;

bool take_from(Block& block, int count, MarkRun& run) {
    for (size_t i = 0; i < block.free.size(); ++i) {
        if (block.free[i].count != count) continue;
        run = block.free[i];
        block.free.erase(block.free.begin() + i);
        return true;
    }
    if (block.used + count > kMarks) return false;
    run.first = block.used;
    run.count = count;
    block.used += count;
    return true;
}

Block make_block(int device) {
    Block block{};
    block.device = device;
    void* base = nullptr;
    check_cuda(cudaMalloc(&base, kBlockBytes), "allocation of closing marks");
    block.base = static_cast<uint64_t*>(base);
    const cudaError_t error = cudaIpcGetMemHandle(&block.handle, base);
    if (error != cudaSuccess) cudaFree(base);
    check_cuda(error, "export of closing marks");
    return block;
}

}  // namespace

MarkRun take_marks(int count) {
    std::lock_guard<std::mutex> lock(blocks_mutex);
    int device = 0;
    check_cuda(cudaGetDevice(&device), "current device");
    MarkRun run{};
    for (size_t i = 0; i <= blocks.size() && run.block < 0; ++i) {
        if (i == blocks.size()) blocks.push_back(make_block(device));
        if (blocks[i].device == device && take_from(blocks[i], count, run)) run.block = int(i);
    }
    const cudaError_t error =
        cudaMemset(blocks[run.block].base + run.first, 0, count * sizeof(uint64_t));
    if (error != cudaSuccess) blocks[run.block].free.push_back(run);
    check_cuda(error, "closing marks");
    return run;
}

void give_back_marks(MarkRun& run) {
    if (run.block < 0) return;
    std::lock_guard<std::mutex> lock(blocks_mutex);
    blocks[run.block].free.push_back(run);
    run = {};
}

uint64_t* address_of(const MarkRun& run) {
    std::lock_guard<std::mutex> lock(blocks_mutex);
    return blocks[run.block].base + run.first;
}

cudaIpcMemHandle_t ipc_handle_of(const MarkRun& run) {
    std::lock_guard<std::mutex> lock(blocks_mutex);
    return blocks[run.block].handle;
}

}  // namespace hybrid_ep::memory
