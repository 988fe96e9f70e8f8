#pragma once
// The one owner of a handle: every descriptor, mapping and similar resource is an alias of Unique.
#include <utility>

namespace deep_ep {

/// Owns one handle and closes it once. Move only.
/// `Traits` gives the type `Handle` (equality comparable), the value `kNull` that owns nothing, and
/// `static void close(Handle) noexcept`.
template <typename Traits>
class Unique {
 public:
  using Handle = typename Traits::Handle;

  Unique() noexcept = default;
  explicit Unique(Handle handle) noexcept : handle_(handle) {}
  Unique(Unique&& other) noexcept : handle_(other.release()) {}
  Unique& operator=(Unique&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  Unique(const Unique&) = delete;
  Unique& operator=(const Unique&) = delete;
  ~Unique() { reset(); }

  Handle get() const noexcept { return handle_; }
  explicit operator bool() const noexcept { return !(handle_ == Traits::kNull); }

  /// Gives the handle up: the caller closes it.
  [[nodiscard]] Handle release() noexcept { return std::exchange(handle_, Traits::kNull); }

  /// Closes the handle, if any, and owns `handle` instead.
  void reset(Handle handle = Traits::kNull) noexcept {
    const Handle old = std::exchange(handle_, handle);
    if (!(old == Traits::kNull)) Traits::close(old);
  }

 private:
  Handle handle_ = Traits::kNull;
};

}  // namespace deep_ep
