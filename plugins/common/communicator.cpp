#include "common/communicator.h"

#include <map>
#include <mutex>

#include "common/error.h"

namespace m3 {
namespace {

std::mutex mutex;
std::map<int32_t, void*> communicators;

}  // namespace

void set_communicator(int32_t group_size, void* communicator) {
  std::lock_guard<std::mutex> lock(mutex);
  if (communicator == nullptr) {
    communicators.erase(group_size);
  } else {
    communicators[group_size] = communicator;
  }
}

void* communicator(int32_t group_size) {
  std::lock_guard<std::mutex> lock(mutex);
  auto const found = communicators.find(group_size);
  M3_CHECK(found != communicators.end(),
           "no communicator for a group of %d ranks: call m3_set_communicator(%d, comm) of the "
           "plugin library before the first step",
           group_size, group_size);
  return found->second;
}

}  // namespace m3
