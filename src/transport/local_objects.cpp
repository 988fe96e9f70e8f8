#include "transport/local_objects.hpp"

#include <map>
#include <mutex>
#include <utility>

#include "base/check.hpp"

namespace deep_ep {
namespace {

struct Offers {
  std::mutex mutex;
  std::map<Id128, std::shared_ptr<void>> by_key;
};

Offers& offers() {
  static Offers instance;
  return instance;
}

}  // namespace

LocalObjectOffer::LocalObjectOffer(std::shared_ptr<void> object) : key_(random_id()) {
  const std::scoped_lock lock(offers().mutex);
  offers().by_key.emplace(key_, std::move(object));
}

LocalObjectOffer::~LocalObjectOffer() {
  std::shared_ptr<void>
      object;  // its destructor, if this was the last owner, runs without the lock
  const std::scoped_lock lock(offers().mutex);
  const auto offer = offers().by_key.find(key_);
  object = std::move(offer->second);
  offers().by_key.erase(offer);
}

std::shared_ptr<void> take_local_object(const Id128& key) {
  const std::scoped_lock lock(offers().mutex);
  const auto offer = offers().by_key.find(key);
  if (offer == offers().by_key.end()) {
    throw Error(ErrorCode::kPeer, "a rank of this process has given up the exchange");
  }
  return offer->second;
}

}  // namespace deep_ep
