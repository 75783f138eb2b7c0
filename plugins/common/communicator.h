#pragma once

#include <cstdint>

namespace m3 {

// ncclComm_t of this process by group size. One engine rank is one process.
void set_communicator(int32_t group_size, void* communicator);

// Throws Error while none is set.
void* communicator(int32_t group_size);

}  // namespace m3
