#include "memory/nvshmem_heap.h"

#include <nvshmem.h>
#include <nvshmemx.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace hybrid_ep::memory {
namespace {

// NVSHMEM explains a failure on stderr alone: keeps what is written there, and passes it on, also
// where the process ends in between.
class StderrText {
  public:
    StderrText() : before_(dup(STDERR_FILENO)), file_(tmpfile()) {
        fflush(stderr);
        if (file_ != nullptr) dup2(fileno(file_), STDERR_FILENO);
        [[maybe_unused]] static const int registered = std::atexit([] {
            if (kept_ != nullptr) kept_->take();
        });
        kept_ = this;
    }
    ~StderrText() {
        take();
        kept_ = nullptr;
    }
    StderrText(const StderrText&) = delete;
    StderrText& operator=(const StderrText&) = delete;

    std::string take() {
        std::string text;
        if (file_ == nullptr) return text;
        fflush(stderr);
        dup2(before_, STDERR_FILENO);
        rewind(file_);
        char line[512];
        while (fgets(line, sizeof(line), file_) != nullptr) text += line;
        fclose(file_);
        close(before_);
        file_ = nullptr;
        fputs(text.c_str(), stderr);
        return text;
    }

  private:
    static inline StderrText* kept_ = nullptr;
    int before_;
    FILE* file_;
};

std::string version(int major, int minor, int patch) {
    return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

[[noreturn]] void fail(const std::string& what, StderrText& said) {
    throw std::runtime_error(what + ": " + said.take());
}

}  // namespace

std::string nvshmem_built_version() {
    return version(NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                   NVSHMEM_VENDOR_PATCH_VERSION);
}

std::string nvshmem_loaded_version() {
    int major = 0, minor = 0, patch = 0;
    nvshmemx_vendor_get_version_info(&major, &minor, &patch);
    return version(major, minor, patch);
}

std::string nvshmem_unique_id() {
    nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
    StderrText said;
    if (nvshmemx_get_uniqueid(&id) != 0) fail("NVSHMEM made no unique id", said);
    return std::string(reinterpret_cast<const char*>(&id), sizeof(id));
}

void start_nvshmem(const std::string& unique_id, int rank, int num_ranks) {
    nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
    nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
    if (unique_id.size() != sizeof(id)) throw std::runtime_error("no unique id of NVSHMEM");
    std::memcpy(&id, unique_id.data(), sizeof(id));
    StderrText said;
    if (nvshmemx_set_attr_uniqueid_args(rank, num_ranks, &id, &attributes) != 0) {
        fail("NVSHMEM refused the unique id", said);
    }
    // as nvshmemx_init_attr does, which ends the process on a failure
    const nvshmemi_version_t built{NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                                   NVSHMEM_VENDOR_PATCH_VERSION};
    int provided = 0;
    const int status = nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED, &provided,
                                            NVSHMEMX_INIT_WITH_UNIQUEID, &attributes, built);
    if (status != 0) fail("NVSHMEM did not start (status " + std::to_string(status) + ")", said);
    // it starts without a GPU, and ends the process at the first use of its heap
    if (nvshmemx_init_status() < NVSHMEM_STATUS_IS_INITIALIZED) {
        fail("NVSHMEM found no GPU to start on", said);
    }
    if (nvshmem_my_pe() != rank || nvshmem_n_pes() != num_ranks) {
        throw std::runtime_error("NVSHMEM numbered the ranks in another way");
    }
}

char* allocate_symmetric(int64_t bytes) {
    StderrText said;
    void* memory = nvshmem_align(128, bytes);
    if (memory == nullptr) {
        fail("allocation of " + std::to_string(bytes) + " bytes of NVSHMEM's symmetric heap", said);
    }
    return static_cast<char*>(memory);
}

void free_symmetric(char* memory) { nvshmem_free(memory); }

char* mapped_symmetric(char* mine, int rank) { return static_cast<char*>(nvshmem_ptr(mine, rank)); }

}  // namespace hybrid_ep::memory
