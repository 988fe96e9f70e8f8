#include "transport/agreement.hpp"

#include <string>

#include "base/check.hpp"
#include "transport/wire.hpp"

namespace deep_ep {
namespace {

/// Whether such an error may be but the echo of another rank's.
bool is_consequence(ErrorCode code) {
  return code == ErrorCode::kPeer || code == ErrorCode::kTimeout;
}

}  // namespace

void throw_if_any_failed(const std::vector<std::optional<Error>>& errors) {
  std::optional<ErrorCode> code;
  std::string text;
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    const std::optional<Error>& error = errors[rank];
    if (!error) continue;
    text +=
        concat(text.empty() ? "" : "; ", "rank ", rank, "/", errors.size(), ": ", error->what());
    if (!code || (is_consequence(*code) && !is_consequence(error->code()))) code = error->code();
  }
  if (code) throw Error(*code, text);
}

void agree_on_success(Bootstrap& bootstrap, const std::optional<Error>& own_error) {
  WireWriter writer;
  writer.put_error(own_error);
  std::vector<std::optional<Error>> errors;
  for (const Bytes& message : bootstrap.all_gather(writer.bytes())) {
    errors.push_back(WireReader(message).take_error());
  }
  throw_if_any_failed(errors);
}

}  // namespace deep_ep
