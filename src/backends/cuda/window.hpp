#pragma once
// Memory of one GPU that every rank of the domain can address.
//
// Physical memory is created apart from its addresses and shared between processes as a file
// descriptor; ranks of one process share the mapping itself.
#include <cstddef>
#include <cstdint>
#include <memory>

#include "backends/cuda/device.hpp"
#include "os/fd.hpp"

namespace deep_ep::cuda {

class Window {
 public:
  /// Makes a window of at least `num_bytes` on `device`, filled with zeros. Throws kDevice, saying
  /// how much memory is free.
  static std::shared_ptr<Window> create(std::shared_ptr<const Device> device,
                                        std::int64_t num_bytes);
  /// Maps a window of another process, of the same `num_bytes`.
  static std::shared_ptr<Window> map(std::shared_ptr<const Device> device, int descriptor,
                                     std::int64_t num_bytes);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  std::byte* base() const noexcept { return reinterpret_cast<std::byte*>(address_); }
  std::int64_t num_bytes() const noexcept { return num_bytes_; }

  /// A descriptor of the memory, for other processes.
  UniqueFd export_descriptor() const;

  /// Lets another GPU of this process address the window.
  void allow(const Device& device) const;

 private:
  Window(std::shared_ptr<const Device> device, CUmemGenericAllocationHandle memory,
         std::int64_t num_bytes);
  void map_memory();

  std::shared_ptr<const Device> device_;
  CUmemGenericAllocationHandle memory_ = 0;
  std::int64_t num_bytes_ = 0;
  CUdeviceptr address_ = 0;
  bool is_mapped_ = false;
};

}  // namespace deep_ep::cuda
