#pragma once
// The first bytes on every new connection between ranks: who is there, and of which group.
#include <cstddef>
#include <span>

#include "deep_ep/bootstrap.hpp"
#include "os/process.hpp"

namespace deep_ep {

struct Hello {
  int rank_idx = 0;
  int num_ranks = 1;
  Id128 token{};  ///< secret of the group; zeros where the ranks have not met before

  bool operator==(const Hello&) const = default;
};

/// Size of every hello: a reader takes so many bytes and no more from a stranger.
inline constexpr std::size_t kHelloBytes = 36;

/// Magic word, protocol version, then the fields.
Bytes encode_hello(const Hello& hello);

/// The hello in `bytes`, if it may come from a rank of the group of `num_ranks` ranks with this
/// token. Throws kPeer if the bytes are none, kInvalidArgument if they are one that does not fit
/// the group (the message is for the sender's eyes too).
Hello parse_hello(std::span<const std::byte> bytes, int num_ranks, const Id128& token);

}  // namespace deep_ep
