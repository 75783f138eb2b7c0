#include "common/cublaslt.h"

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "common/cublaslt_api.h"
#include "common/dynamic_library.h"
#include "common/error.h"

namespace m3 {
namespace {

using namespace cublaslt;

Api const& api() {
  static Api const loaded = [] {
    void* library =
        open_library("M3Gemm", {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"});
    Api a{};
    load_symbol(library, "cublasLtCreate", a.create);
    load_symbol(library, "cublasLtMatmulDescCreate", a.desc_create);
    load_symbol(library, "cublasLtMatmulDescDestroy", a.desc_destroy);
    load_symbol(library, "cublasLtMatmulDescSetAttribute", a.desc_set);
    load_symbol(library, "cublasLtMatrixLayoutCreate", a.layout_create);
    load_symbol(library, "cublasLtMatrixLayoutDestroy", a.layout_destroy);
    load_symbol(library, "cublasLtMatmulPreferenceCreate", a.preference_create);
    load_symbol(library, "cublasLtMatmulPreferenceDestroy", a.preference_destroy);
    load_symbol(library, "cublasLtMatmulPreferenceSetAttribute", a.preference_set);
    load_symbol(library, "cublasLtMatmulAlgoGetHeuristic", a.heuristic);
    load_symbol(library, "cublasLtMatmul", a.matmul);
    return a;
  }();
  return loaded;
}

// The largest power of two, at most 256, that divides the address.
uint32_t alignment(void const* pointer) {
  auto const address = reinterpret_cast<uintptr_t>(pointer) | 256;
  return static_cast<uint32_t>(address & -address);
}

// Of x, weight, y and the bias, 0 without one: an algorithm is chosen for them.
std::array<uint32_t, 4> alignments(Matmul const& p) {
  return {alignment(p.x), alignment(p.weight), alignment(p.y),
          p.bias == nullptr ? 0 : alignment(p.bias)};
}

void check(Status status, char const* call, Matmul const& p) {
  M3_CHECK(status == kSuccess,
           "%s returned status %d for x [%lld, %lld] at %p, weight [%lld, %lld] at %p, y at %p and "
           "the bias at %p",
           call, status, static_cast<long long>(p.m), static_cast<long long>(p.k), p.x,
           static_cast<long long>(p.n), static_cast<long long>(p.k), p.weight, p.y, p.bias);
}

// cuBLASLt objects are opaque pointers with their own destroy function.
using Object = std::unique_ptr<void, Status (*)(void*)>;

cudaDataType data_type(kernels::Type type) {
  return type == kernels::Type::kFloat32 ? CUDA_R_32F : CUDA_R_16BF;
}

Object layout(kernels::Type type, int64_t rows, int64_t cols, Matmul const& p) {
  MatrixLayout object = nullptr;
  check(api().layout_create(&object, data_type(type), rows, cols, rows),
        "cublasLtMatrixLayoutCreate", p);
  return {object, api().layout_destroy};
}

template <class Value>
void set(Object const& desc, int attribute, Value value, Matmul const& p) {
  check(api().desc_set(desc.get(), attribute, &value, sizeof(value)),
        "cublasLtMatmulDescSetAttribute", p);
}

Handle handle(int device, Matmul const& p) {
  static std::mutex mutex;
  static std::map<int, Handle> handles;  // one per device, for the process
  std::lock_guard<std::mutex> lock(mutex);
  auto& entry = handles[device];
  if (entry == nullptr) check(api().create(&entry), "cublasLtCreate", p);
  return entry;
}

struct Operation {
  Object desc, weight, x, y;
};

// cuBLASLt is column-major: y^T [N, M] = weight^T' * x^T, with the row-major arrays read as they
// lie.
Operation describe(Matmul const& p) {
  MatmulDesc desc = nullptr;
  check(api().desc_create(&desc, kCompute32F, CUDA_R_32F), "cublasLtMatmulDescCreate", p);
  Operation op{{desc, api().desc_destroy},
               layout(p.in_type, p.k, p.n, p),
               layout(p.in_type, p.k, p.m, p),
               layout(p.out_type, p.n, p.m, p)};
  set(op.desc, kDescTransA, kTranspose, p);
  if (p.bias != nullptr) {
    set(op.desc, kDescEpilogue, kEpilogueBias, p);
    set(op.desc, kDescBiasPointer, p.bias, p);
  }
  return op;
}

Algo search(Matmul const& p, Operation const& op, Handle lt) {
  Preference object = nullptr;
  check(api().preference_create(&object), "cublasLtMatmulPreferenceCreate", p);
  Object const preference{object, api().preference_destroy};
  auto prefer = [&](int attribute, auto value) {
    check(api().preference_set(object, attribute, &value, sizeof(value)),
          "cublasLtMatmulPreferenceSetAttribute", p);
  };
  prefer(kPreferMaxWorkspace, uint64_t{kMatmulWorkspaceBytes});
  // Split-K sums stay in fp32: the other schemes round partial sums to y's type.
  prefer(kPreferReductionSchemes, kReduceInComputeType);
  void const* const pointers[] = {p.weight, p.x, p.y, p.y};
  for (int i = 0; i < 4; ++i) prefer(kPreferAlignmentA + i, alignment(pointers[i]));

  HeuristicResult result{};
  int found = 0;
  check(api().heuristic(lt, op.desc.get(), op.weight.get(), op.x.get(), op.y.get(), op.y.get(),
                        object, 1, &result, &found),
        "cublasLtMatmulAlgoGetHeuristic", p);
  M3_CHECK(found == 1, "cuBLASLt knows no algorithm for x [%lld, %lld] and weight [%lld, %lld]",
           static_cast<long long>(p.m), static_cast<long long>(p.k), static_cast<long long>(p.n),
           static_cast<long long>(p.k));
  return result.algo;
}

Algo cached_algo(Matmul const& p, Operation const& op, Handle lt, int device) {
  using Key = std::tuple<int, int64_t, int64_t, int64_t, kernels::Type, kernels::Type,
                         std::array<uint32_t, 4>>;
  static std::mutex mutex;
  static std::map<Key, Algo> algos;
  Key const key{device, p.m, p.n, p.k, p.in_type, p.out_type, alignments(p)};
  std::lock_guard<std::mutex> lock(mutex);
  auto found = algos.find(key);
  if (found == algos.end()) found = algos.emplace(key, search(p, op, lt)).first;
  return found->second;
}

}  // namespace

void matmul(Matmul const& p, void* workspace, cudaStream_t stream) {
  int device = 0;
  M3_CHECK(cudaGetDevice(&device) == cudaSuccess, "there is no current CUDA device");
  Handle const lt = handle(device, p);
  Operation const op = describe(p);
  Algo const algo = cached_algo(p, op, lt, device);
  float const one = 1;
  float const zero = 0;
  check(
      api().matmul(lt, op.desc.get(), &one, p.weight, op.weight.get(), p.x, op.x.get(), &zero, p.y,
                   op.y.get(), p.y, op.y.get(), &algo, workspace, kMatmulWorkspaceBytes, stream),
      "cublasLtMatmul", p);
}

}  // namespace m3
