#include "network/nvshmem_heap.h"

#include <nvshmem.h>
#include <nvshmemx.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace hybrid_ep::network {
namespace {

// NVSHMEM explains a failure on stderr alone, and may never return from a call. While one of these
// lives, stderr goes to a file. A thread copies the file to the real stderr, so a hang or the end
// of the process hides at most kShowEvery of the text; take() returns all of it for an exception.
class StderrText {
  public:
    StderrText() : before_(dup(STDERR_FILENO)), file_(before_ < 0 ? nullptr : tmpfile()) {
        if (file_ == nullptr) return;
        copier_ = std::thread([this] { copy_until_taken(); });  // first: it may throw
        fflush(stderr);
        dup2(fileno(file_), STDERR_FILENO);
        [[maybe_unused]] static const int registered = std::atexit([] {
            if (kept_ != nullptr) kept_->take();
        });
        kept_ = this;
    }
    ~StderrText() {
        take();
        if (before_ >= 0) close(before_);
    }
    StderrText(const StderrText&) = delete;
    StderrText& operator=(const StderrText&) = delete;

    std::string take() {
        if (file_ == nullptr) return text_;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            is_taken_ = true;
        }
        wake_.notify_one();
        copier_.join();
        fflush(stderr);
        dup2(before_, STDERR_FILENO);
        copy_new_text();
        fclose(file_);
        file_ = nullptr;
        kept_ = nullptr;
        return text_;
    }

  private:
    static constexpr std::chrono::milliseconds kShowEvery{500};

    void copy_until_taken() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (!wake_.wait_for(lock, kShowEvery, [this] { return is_taken_; })) copy_new_text();
    }

    // pread, because the offset of the file is that of its writers.
    void copy_new_text() {
        char part[512];
        ssize_t bytes;
        while ((bytes = pread(fileno(file_), part, sizeof(part), text_.size())) > 0) {
            text_.append(part, bytes);
            for (ssize_t shown = 0, more; shown < bytes; shown += more) {
                more = write(before_, part + shown, bytes - shown);
                if (more <= 0) break;
            }
        }
    }

    static inline StderrText* kept_ = nullptr;
    int before_;  // the real stderr
    FILE* file_;
    std::string text_;
    std::mutex mutex_;
    std::condition_variable wake_;
    bool is_taken_ = false;
    std::thread copier_;
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

}  // namespace hybrid_ep::network
