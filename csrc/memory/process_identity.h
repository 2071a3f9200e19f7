// Tells whether another process of this host still lives: by its number and the time it started,
// since numbers are given again.
#pragma once

#include <cstdint>

namespace hybrid_ep::memory {

struct ProcessIdentity {
    int64_t number;
    uint64_t started;               // of the system's clock ticks; 0: not known
    uint64_t namespace_of_numbers;  // in another one the number means another process
};

ProcessIdentity this_process();
// False also where it cannot be known.
bool has_ended(const ProcessIdentity& process);

}  // namespace hybrid_ep::memory
