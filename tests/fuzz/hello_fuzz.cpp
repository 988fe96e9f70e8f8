// Everything that a stranger's bytes reach before they are known to come from a rank.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "deep_ep/error.hpp"
#include "transport/frame.hpp"
#include "transport/hello.hpp"
#include "transport/wire.hpp"

namespace {

/// Runs a parser, which may refuse the bytes with an Error but do nothing else about them.
template <typename Parse>
void try_parse(const Parse& parse) {
  try {
    parse();
  } catch (const deep_ep::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  try_parse([&] {
    const deep_ep::Hello hello = deep_ep::parse_hello(bytes, 8, deep_ep::Id128{});
    if (hello.rank_idx < 0 || hello.rank_idx >= 8) std::abort();
    const deep_ep::Bytes again = deep_ep::encode_hello(hello);
    if (!std::equal(again.begin(), again.end(), bytes.begin(), bytes.end())) std::abort();
  });
  try_parse([&] {
    if (deep_ep::parse_frame_header(bytes, 1 << 20).payload_bytes > 1 << 20) std::abort();
  });
  try_parse([&] {
    deep_ep::WireReader reader(bytes);
    reader.take_error();
    for (;;) reader.take_bytes();
  });
  return 0;
}
