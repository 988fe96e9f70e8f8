#include "transport/hello.hpp"

#include <cstdint>

#include "base/check.hpp"
#include "transport/wire.hpp"

namespace deep_ep {
namespace {

constexpr std::uint64_t kMagic = 0x0a70'655f'7065'6564;  // "deep_ep\n" in the order of the bytes
constexpr std::uint32_t kVersion = 1;                    // changes with any message between ranks

}  // namespace

Bytes encode_hello(const Hello& hello) {
  WireWriter writer;
  writer.put_u64(kMagic);
  writer.put_u32(kVersion);
  writer.put_u32(static_cast<std::uint32_t>(hello.num_ranks));
  writer.put_u32(static_cast<std::uint32_t>(hello.rank_idx));
  writer.put_id(hello.token);
  internal_check(writer.bytes().size() == kHelloBytes, "a hello has its fixed size");
  return writer.take();
}

Hello parse_hello(std::span<const std::byte> bytes, int num_ranks, const Id128& token) {
  WireReader reader(bytes);
  if (reader.take_u64() != kMagic) {
    throw Error(ErrorCode::kPeer, "what came is no hello of a rank");
  }
  const std::uint32_t version = reader.take_u32();
  require(version == kVersion,
          "all ranks must run the same version of the library: this one speaks "
          "protocol ",
          kVersion, ", the other ", version);
  const std::uint32_t sent_num_ranks = reader.take_u32();
  require(sent_num_ranks == static_cast<std::uint32_t>(num_ranks),
          "all ranks must name the same number of ranks, got ", sent_num_ranks, " in a group of ",
          num_ranks);
  const std::uint32_t rank_idx = reader.take_u32();
  require(rank_idx < sent_num_ranks, "rank must be in [0, ", num_ranks, "), got ", rank_idx);
  require(reader.take_id() == token, "rank ", rank_idx, " belongs to another group");
  reader.require_end();
  return {.rank_idx = static_cast<int>(rank_idx), .num_ranks = num_ranks, .token = token};
}

}  // namespace deep_ep
