// The TCP bootstrap with what a launcher such as torchrun left in the environment.
#include <cstdint>
#include <limits>
#include <optional>

#include "base/check.hpp"
#include "base/config.hpp"
#include "deep_ep/bootstrap.hpp"

namespace deep_ep {
namespace {

/// Reads variables and remembers what is wrong with them, so that one error can name it all.
class EnvironmentReader {
 public:
  std::string text(const char* name) {
    const std::optional<std::string> value = config::read_environment(name);
    if (!value) complain(name, " is not set");
    return value.value_or("");
  }

  int integer(const char* name) {
    const std::string value = text(name);
    if (value.empty()) return 0;
    const std::optional<std::int64_t> number = config::parse_integer(value);
    if (!number || *number < 0 || *number > std::numeric_limits<int>::max()) {
      complain(name, concat(" must be an integer of at least 0, got '", value, "'"));
      return 0;
    }
    return static_cast<int>(*number);
  }

  void require_none_wrong() const { require(complaints_.empty(), complaints_); }

 private:
  void complain(const char* name, const std::string& complaint) {
    complaints_ += concat(complaints_.empty() ? "" : "; ", name, complaint);
  }

  std::string complaints_;
};

}  // namespace

std::shared_ptr<Bootstrap> make_env_bootstrap(std::chrono::nanoseconds timeout) {
  EnvironmentReader environment;
  const int rank_idx = environment.integer("RANK");
  const int num_ranks = environment.integer("WORLD_SIZE");
  const std::string address = environment.text("MASTER_ADDR");
  const int port = environment.integer("MASTER_PORT");
  environment.require_none_wrong();
  return make_tcp_bootstrap(rank_idx, num_ranks, address, port, timeout);
}

}  // namespace deep_ep
