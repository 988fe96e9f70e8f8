#include "backends/cuda/window.hpp"

#include <utility>

#include "base/check.hpp"

namespace deep_ep::cuda {

namespace {

constexpr int kPosixDescriptor = 1;

CUmemAllocationProp properties(const Device& device) {
  CUmemAllocationProp prop;
  prop.requested_handle_types = kPosixDescriptor;
  prop.location.id = device.ordinal();
  return prop;
}

std::int64_t whole_pages(const Device& device, std::int64_t num_bytes) {
  const CUmemAllocationProp prop = properties(device);
  std::size_t granularity = 0;
  check(driver().cuMemGetAllocationGranularity(&granularity, &prop, 0),
        "cuMemGetAllocationGranularity");
  const auto page = static_cast<std::int64_t>(granularity);
  return (num_bytes + page - 1) / page * page;
}

}  // namespace

Window::Window(std::shared_ptr<const Device> device, CUmemGenericAllocationHandle memory,
               std::int64_t num_bytes)
    : device_(std::move(device)), memory_(memory), num_bytes_(num_bytes) {}

std::shared_ptr<Window> Window::create(std::shared_ptr<const Device> device,
                                       std::int64_t num_bytes) {
  const CurrentContext current(*device);
  const std::int64_t size = whole_pages(*device, num_bytes);
  std::size_t num_free = 0, num_total = 0;
  check(driver().cuMemGetInfo(&num_free, &num_total), "cuMemGetInfo");
  const CUmemAllocationProp prop = properties(*device);
  CUmemGenericAllocationHandle memory = 0;
  if (const CUresult result =
          driver().cuMemCreate(&memory, static_cast<std::size_t>(size), &prop, 0);
      result != kSuccess) {
    check(result, concat("cuMemCreate of ", size, " bytes on cuda:", device->ordinal(), ", where ",
                         num_free, " are free")
                      .c_str());
  }
  std::shared_ptr<Window> window(new Window(std::move(device), memory, size));
  window->map_memory();
  check(driver().cuMemsetD8(window->address_, 0, static_cast<std::size_t>(size)), "cuMemsetD8");
  check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
  return window;
}

std::shared_ptr<Window> Window::map(std::shared_ptr<const Device> device, int descriptor,
                                    std::int64_t num_bytes) {
  const CurrentContext current(*device);
  const std::int64_t size = whole_pages(*device, num_bytes);
  CUmemGenericAllocationHandle memory = 0;
  void* const handle = reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor));
  check(driver().cuMemImportFromShareableHandle(&memory, handle, kPosixDescriptor),
        "cuMemImportFromShareableHandle");
  std::shared_ptr<Window> window(new Window(std::move(device), memory, size));
  window->map_memory();
  return window;
}

void Window::map_memory() {
  const auto size = static_cast<std::size_t>(num_bytes_);
  check(driver().cuMemAddressReserve(&address_, size, 0, 0, 0), "cuMemAddressReserve");
  check(driver().cuMemMap(address_, size, 0, memory_, 0), "cuMemMap");
  is_mapped_ = true;
  allow(*device_);
}

void Window::allow(const Device& device) const {
  CUmemAccessDesc access;
  access.location.id = device.ordinal();
  check(driver().cuMemSetAccess(address_, static_cast<std::size_t>(num_bytes_), &access, 1),
        concat("cuMemSetAccess for cuda:", device.ordinal(),
               " to memory that cuda:", device_->ordinal(), " maps")
            .c_str());
}

UniqueFd Window::export_descriptor() const {
  int descriptor = -1;
  check(driver().cuMemExportToShareableHandle(&descriptor, memory_, kPosixDescriptor, 0),
        "cuMemExportToShareableHandle");
  return UniqueFd(descriptor);
}

Window::~Window() {
  const auto size = static_cast<std::size_t>(num_bytes_);
  if (is_mapped_) driver().cuMemUnmap(address_, size);
  if (address_ != 0) driver().cuMemAddressFree(address_, size);
  driver().cuMemRelease(memory_);
}

}  // namespace deep_ep::cuda
