#pragma once
// Copies of whole rows by the bulk copy engine (sm_90 and later): global to shared memory with an
// mbarrier that counts bytes, shared to global memory in groups.
#include <cstdint>

namespace deep_ep::device {

#if __CUDA_ARCH__ >= 900

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void barrier_init(std::uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

/// Makes initialised barriers visible to the copy engine.
__device__ inline void barrier_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// One thread: starts to fetch `num_bytes` (a multiple of 16, as are the addresses).
__device__ inline void bulk_load(void* target, const void* source, std::uint32_t num_bytes,
                                 std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "r"(num_bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(target)),
      "l"(source), "r"(num_bytes), "r"(shared_address(barrier))
      : "memory");
}

/// Waits for the fetch of the given phase (0, 1, 0, ...). Ends: the copy engine does not hang.
__device__ inline void barrier_wait(std::uint64_t* barrier, std::uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}

/// One thread: starts to write `num_bytes`, as part of the thread's current group.
__device__ inline void bulk_store(void* target, const void* source, std::uint32_t num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
               "r"(shared_address(source)), "r"(num_bytes)
               : "memory");
}

__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// Waits until all but the newest `kNum` groups of this thread have read shared memory.
template <int kNum>
__device__ inline void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kNum) : "memory");
}

/// Waits until everything that this thread stored is written.
__device__ inline void bulk_wait_all() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}

#endif

}  // namespace deep_ep::device
