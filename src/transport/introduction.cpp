#include "transport/introduction.hpp"

#include <algorithm>

#include "base/check.hpp"
#include "transport/agreement.hpp"
#include "transport/rank_list.hpp"
#include "transport/wire.hpp"

namespace deep_ep {
namespace {

template <typename Predicate>
std::vector<int> ranks_where(const std::vector<Introduction>& ranks, const Predicate& predicate) {
  std::vector<int> found;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (predicate(ranks[rank])) found.push_back(static_cast<int>(rank));
  }
  return found;
}

/// Depends on what all ranks know alike, so all of them throw or none.
void require_shareable(const std::vector<Introduction>& ranks) {
  const Introduction& first = ranks.front();
  const std::vector<int> elsewhere =
      ranks_where(ranks, [&](const Introduction& rank) { return rank.boot_id != first.boot_id; });
  if (!elsewhere.empty()) {
    throw Error(
        ErrorCode::kUnsupported,
        concat("all ranks must run on one machine, because this build has no network backend, "
               "but ",
               rank_list(elsewhere), " and rank 0 do not"));
  }
  const bool is_one_process = std::ranges::all_of(
      ranks, [&](const Introduction& rank) { return rank.process == first.process; });
  const std::vector<int> without =
      ranks_where(ranks, [](const Introduction& rank) { return !rank.has_descriptor; });
  require(is_one_process || without.empty(),
          "ranks of several processes must each have a descriptor to share, but ",
          rank_list(without), " gave none");
}

}  // namespace

std::vector<Introduction> introduce(Bootstrap& bootstrap, const Introduction& own,
                                    const std::optional<Error>& own_error) {
  WireWriter writer;
  writer.put_error(own_error);
  writer.put_id(own.process);
  writer.put_text(own.boot_id);
  writer.put_text(own.socket_name);
  writer.put_id(own.object_key);
  writer.put_id(own.token);
  writer.put_u32(own.has_descriptor ? 1 : 0);

  std::vector<Introduction> ranks;
  std::vector<std::optional<Error>> errors;
  for (const Bytes& message : bootstrap.all_gather(writer.bytes())) {
    WireReader reader(message);
    errors.push_back(reader.take_error());
    Introduction& rank = ranks.emplace_back();
    rank.process = reader.take_id();
    rank.boot_id = reader.take_text();
    rank.socket_name = reader.take_text();
    rank.object_key = reader.take_id();
    rank.token = reader.take_id();
    rank.has_descriptor = reader.take_u32() != 0;
    reader.require_end();
  }
  throw_if_any_failed(errors);
  require_shareable(ranks);
  return ranks;
}

}  // namespace deep_ep
