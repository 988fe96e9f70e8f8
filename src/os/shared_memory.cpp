#include "os/shared_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>

#include "base/check.hpp"
#include "os/system_error.hpp"

namespace deep_ep {

UniqueFd create_shared_memory(const char* name, std::int64_t num_bytes) {
  require(num_bytes > 0, "shared memory must have at least 1 byte, got ", num_bytes);
  UniqueFd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw_system_error(errno, "memfd_create ", name, " for ", num_bytes, " bytes");
  if (::ftruncate(fd.get(), num_bytes) != 0) {
    throw_system_error(errno, "ftruncate ", name, " to ", num_bytes, " bytes");
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw_system_error(errno, "fcntl F_ADD_SEALS ", name);
  }
  return fd;
}

void release_pages(int fd, std::int64_t offset, std::int64_t num_bytes) {
  require(offset >= 0 && num_bytes >= 0, "offset and bytes must not be negative, got ", offset,
          " and ", num_bytes);
  if (num_bytes == 0) return;  // fallocate refuses an empty range
  while (::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, num_bytes) != 0) {
    if (errno == EINTR) continue;
    throw_system_error(errno, "fallocate PUNCH_HOLE on descriptor ", fd, " of ", num_bytes,
                       " bytes at ", offset);
  }
}

void MappingTraits::close(Handle handle) noexcept { ::munmap(handle.data, handle.num_bytes); }

Mapping::Mapping(int fd, std::int64_t num_bytes) {
  require(num_bytes > 0, "a mapping must have at least 1 byte, got ", num_bytes);
  struct stat status {};
  if (::fstat(fd, &status) != 0) throw_system_error(errno, "fstat descriptor ", fd);
  require(status.st_size >= num_bytes, "shared memory of ", status.st_size,
          " bytes is too small to map ", num_bytes, " bytes");
  const auto size = static_cast<std::size_t>(num_bytes);
  void* const data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED)
    throw_system_error(errno, "mmap descriptor ", fd, " of ", num_bytes, " bytes");
  handle_.reset({.data = data, .num_bytes = size});
}

}  // namespace deep_ep
