// What a read of an evicted tensor finds that does not come through the dispatcher: NumPy, `data_ptr`, pickle, a thread
// without the key, a C++ extension. Never garbage: its content, or an error.
//
// FAULT, the default where there is a handler: the storage points to addresses that may not be read. A load or store
// there is a fault of this thread; the handler brings the content to that place, and the instruction runs again. Access
// by torch's own mutable pointers is noticed before (escapes.h), and needs no fault.
// ERROR: each access through torch is an error with a message. A pointer that was kept from before finds nothing.

enum class Guard { ERROR, FAULT };
Guard guard = Guard::FAULT;

constexpr DispatchKey KEY = DispatchKey::Fake;

class Addresses {  // one stretch that may not be read, from which pieces are handed out; no system call for each
 public:
  bool open() {
    if (base_) return true;
    for (size_t size = size_t(1) << 44; size >= size_t(1) << 38; size >>= 1) {  // 16 TiB, or less where that is limited
      void* at = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (at == MAP_FAILED) continue;
      base_ = next_ = uintptr_t(at);
      end_ = base_ + size;
      return true;
    }
    return false;
  }

  void* take(Value* v, size_t bytes) {  // null: there is no piece of this size
    const size_t size = pages(bytes);
    for (uintptr_t at : {next_, base_}) {  // the first gap after the last piece, or the first one of all
      auto other = taken_.upper_bound(at);
      if (other != taken_.begin()) at = std::max(at, end_of(std::prev(other)));
      for (; other != taken_.end() && other->first < at + size; ++other) at = end_of(other);
      if (at + size > end_) continue;
      taken_[at] = {v, size};
      next_ = at + size;
      return reinterpret_cast<void*>(at);
    }
    return nullptr;
  }

  std::optional<Value*> at(uintptr_t address) const {  // whose piece it is, while that is evicted; null: it is filled
    auto it = taken_.upper_bound(address);
    if (it == taken_.begin()) return {};
    --it;
    if (address >= end_of(it)) return {};
    return it->second.value;
  }

  void free(void* at) { taken_.erase(uintptr_t(at)); }

  bool fill(void* at, const void* content, size_t bytes) {  // from now on it is memory like any other
    if (mprotect(at, pages(bytes), PROT_READ | PROT_WRITE)) return false;
    std::memcpy(at, content, bytes);
    taken_[uintptr_t(at)].value = nullptr;
    return true;
  }

  void empty(void* at, size_t bytes) {
    mmap(at, pages(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    free(at);
  }

 private:
  struct Piece {
    Value* value;
    size_t size;
  };
  static uintptr_t end_of(std::map<uintptr_t, Piece>::const_iterator piece) { return piece->first + piece->second.size; }

  uintptr_t base_ = 0, next_ = 0, end_ = 0;
  std::map<uintptr_t, Piece> taken_;
};
Addresses& addresses = *new Addresses;

void unreserve(Value* v, bool keep) {
  if (v->range && !keep) addresses.free(v->range);
  v->range = nullptr;
}

void on_escape(StorageImpl*);

void arm(StorageImpl* storage) {  // be told when an address is asked for outside of operators
  if (!storage->has_materializer()) storage->set_materializer(&on_escape);
}

void protect(StorageImpl* storage, bool readable) {
  static const std::string message =
      "the memory of this tensor is evicted, and was asked for past PyTorch's operators, where it cannot be brought back: "
      "clone the tensor first";
  storage->clear_materializer();
  storage->set_materializer(&on_escape);
  if (!readable) storage->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

void unprotect(StorageImpl* storage) {
  storage->clear_data_ptr_access_error_msg_();
  storage->clear_materializer();
}
