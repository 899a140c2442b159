// Where counted memory comes from, so that what the system gives follows the count.
//
// malloc keeps freed blocks of up to 32 MB in its heap: a process whose tensors take half then has nearly as much as
// before. And pages that are asked for anew each time cost a third of a step. So within a budget large blocks are mapped
// here, and freed ones are kept by size for whoever asks next, as long as all of them together are within the budget.

constexpr size_t LARGE = size_t(1) << 17;  // bytes

size_t pages(size_t bytes) { return (bytes + 4095) & ~size_t(4095); }

class Blocks {
 public:
  // A block of at least `size` bytes, which becomes what it really has; null: the system has none. `room`: bytes that it
  // and the kept ones may take together.
  void* take(size_t& size, int64_t room) {
    std::lock_guard lock(mutex_);
    size = pages(size);
    auto kept = free_.lower_bound(size);
    if (kept != free_.end() && kept->first <= size + size / 8) {
      void* block = kept->second;
      size = kept->first;
      bytes_ -= size;
      free_.erase(kept);
      return block;
    }
    shrink(room - int64_t(size));
    void* block = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return block == MAP_FAILED ? nullptr : block;
  }

  void give(void* block, size_t size, bool keep) {
    std::lock_guard lock(mutex_);
    if (!keep) {
      munmap(block, size);
      return;
    }
    free_.emplace(size, block);
    bytes_ += size;
  }

  void keep_at_most(int64_t bytes) {
    std::lock_guard lock(mutex_);
    shrink(bytes);
  }

 private:
  void shrink(int64_t bytes) {
    while (bytes_ > std::max<int64_t>(0, bytes)) {
      auto last = std::prev(free_.end());
      munmap(last->second, last->first);
      bytes_ -= last->first;
      free_.erase(last);
    }
  }
  std::mutex mutex_;
  std::multimap<size_t, void*> free_;
  int64_t bytes_ = 0;
};
Blocks& blocks = *new Blocks;
