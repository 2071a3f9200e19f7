#include "memory/process_identity.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

namespace hybrid_ep::memory {
namespace {

struct Status {
    bool is_there, is_known;
    char state;
    uint64_t started;
};

Status status_of(int64_t number) {
    const std::string path = "/proc/" + std::to_string(number) + "/stat";
    FILE* file = fopen(path.c_str(), "r");
    if (file == nullptr) return {false, errno == ENOENT, 0, 0};
    char text[1024] = {};
    const size_t size = fread(text, 1, sizeof(text) - 1, file);
    fclose(file);
    // the second field is the program's name in parentheses, which may hold anything
    const char* rest = size > 0 ? strrchr(text, ')') : nullptr;
    Status status{true, false, 0, 0};
    unsigned long long started = 0;
    status.is_known =
        rest != nullptr &&
        sscanf(rest + 1,
               " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
               &status.state, &started) == 2;
    status.started = started;
    return status;
}

int num_threads_of(int64_t number) {
    DIR* threads = opendir(("/proc/" + std::to_string(number) + "/task").c_str());
    if (threads == nullptr) return 0;
    int count = 0;
    while (const dirent* entry = readdir(threads)) count += entry->d_name[0] != '.';
    closedir(threads);
    return count;
}

uint64_t my_namespace() {
    struct stat about{};
    return stat("/proc/self/ns/pid", &about) == 0 ? uint64_t(about.st_ino) : 0;
}

}  // namespace

ProcessIdentity this_process() {
    const Status status = status_of(getpid());
    return {getpid(), status.is_known ? status.started : 0, my_namespace()};
}

bool has_ended(const ProcessIdentity& process) {
    if (process.started == 0 || process.namespace_of_numbers != my_namespace()) return false;
    const Status status = status_of(process.number);
    if (!status.is_there) return status.is_known;
    if (!status.is_known) return false;
    if (status.started != process.started) return true;
    // a zombie has given back all that it held, unless other threads outlive its first one
    const bool is_zombie = status.state == 'Z' || status.state == 'X';
    return is_zombie && num_threads_of(process.number) <= 1;
}

}  // namespace hybrid_ep::memory
