#pragma once
// How ranks of one process find each other's objects: under a random key that they exchange.
//
// A key instead of an address, although both would do in one address space: an address dangles when
// the exchange fails on one rank only, and the lock makes what the owner wrote visible to who takes
// it, even if the ranks met over a network that no memory model knows of.
#include <memory>

#include "os/process.hpp"

namespace deep_ep {

/// Offers an object to the threads of this process for as long as this lives.
class LocalObjectOffer {
 public:
  explicit LocalObjectOffer(std::shared_ptr<void> object);
  LocalObjectOffer(const LocalObjectOffer&) = delete;
  LocalObjectOffer& operator=(const LocalObjectOffer&) = delete;
  ~LocalObjectOffer();

  const Id128& key() const noexcept { return key_; }

 private:
  Id128 key_;
};

/// The object offered under `key`. Throws kPeer if it is offered no longer.
std::shared_ptr<void> take_local_object(const Id128& key);

}  // namespace deep_ep
