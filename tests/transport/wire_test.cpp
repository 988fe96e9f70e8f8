#include "transport/wire.hpp"

#include <gtest/gtest.h>

#include "support/errors.hpp"

namespace deep_ep {
namespace {

using testing::error_from;
using testing::is_error;

TEST(WireTest, ReadsBackWhatWasPut) {
  WireWriter writer;
  writer.put_u32(0x01020304);
  writer.put_u64(0x1122334455667788);
  writer.put_id({9, 8, 7});
  writer.put_text("text");
  writer.put_error(std::nullopt);
  writer.put_error(Error(ErrorCode::kTimeout, "late"));
  EXPECT_EQ(writer.bytes()[0], std::byte{4});  // little-endian

  WireReader reader(writer.bytes());
  EXPECT_EQ(reader.take_u32(), 0x01020304U);
  EXPECT_EQ(reader.take_u64(), 0x1122334455667788U);
  EXPECT_EQ(reader.take_id(), (Id128{9, 8, 7}));
  EXPECT_EQ(reader.take_text(), "text");
  EXPECT_FALSE(reader.take_error());
  EXPECT_TRUE(is_error(*reader.take_error(), ErrorCode::kTimeout, "late"));
  reader.require_end();
}

TEST(WireTest, RefusesALengthBeyondTheEnd) {
  WireWriter writer;
  writer.put_u64(UINT64_MAX);
  EXPECT_TRUE(is_error(error_from([&] { WireReader(writer.bytes()).take_bytes(); }),
                       ErrorCode::kPeer, "cut off"));
}

TEST(WireTest, RefusesAStatusThatIsNone) {
  WireWriter writer;
  writer.put_u32(99);
  EXPECT_TRUE(is_error(error_from([&] { WireReader(writer.bytes()).take_error(); }),
                       ErrorCode::kPeer, "99"));
}

TEST(WireTest, RefusesBytesThatNobodyExpects) {
  const Bytes bytes(3);
  EXPECT_TRUE(is_error(error_from([&] { WireReader(bytes).require_end(); }), ErrorCode::kPeer,
                       "3 bytes too many"));
}

}  // namespace
}  // namespace deep_ep
