// Gathers through a function of the caller.
#include <algorithm>
#include <utility>

#include "base/check.hpp"
#include "deep_ep/bootstrap.hpp"

namespace deep_ep {
namespace {

using AllGather = std::function<std::vector<Bytes>(std::span<const std::byte>)>;

class CallbackBootstrap final : public Bootstrap {
 public:
  CallbackBootstrap(int rank_idx, int num_ranks, AllGather all_gather, std::string host_id)
      : rank_idx_(rank_idx),
        num_ranks_(num_ranks),
        all_gather_(std::move(all_gather)),
        host_id_(std::move(host_id)) {}

  int rank_idx() const noexcept override { return rank_idx_; }
  int num_ranks() const noexcept override { return num_ranks_; }
  std::string host_id() const override { return host_id_; }

  std::vector<Bytes> all_gather(std::span<const std::byte> message) override {
    std::vector<Bytes> messages = all_gather_(message);
    require(messages.size() == static_cast<std::size_t>(num_ranks_),
            "all_gather of the caller must give one message a rank, got ", messages.size(), " for ",
            num_ranks_, " ranks");
    // catches an order other than that of ranks, and padding, where they are cheapest to explain
    require(
        std::ranges::equal(messages[static_cast<std::size_t>(rank_idx_)], message),
        "all_gather of the caller must give the messages unchanged and in rank order, but that of "
        "rank ",
        rank_idx_, " is not what this rank gave");
    return messages;
  }

 private:
  int rank_idx_;
  int num_ranks_;
  AllGather all_gather_;
  std::string host_id_;
};

}  // namespace

std::shared_ptr<Bootstrap> make_callback_bootstrap(int rank_idx, int num_ranks,
                                                   AllGather all_gather, std::string host_id) {
  require(num_ranks >= 1, "num_ranks must be at least 1, got ", num_ranks);
  require(rank_idx >= 0 && rank_idx < num_ranks, "rank must be in [0, ", num_ranks, "), got ",
          rank_idx);
  require(all_gather != nullptr, "all_gather must be a function, got none");
  return std::make_shared<CallbackBootstrap>(rank_idx, num_ranks, std::move(all_gather),
                                             std::move(host_id));
}

}  // namespace deep_ep
