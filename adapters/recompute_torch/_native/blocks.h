// Where counted memory comes from, so that what the system gives follows the count.
//
// malloc keeps freed blocks of up to 32 MB in its heap: a process whose tensors take half then has nearly as much as
// before. Pages that are asked for anew each time cost up to a third of a step; and a step of an MLP took 8 % longer in
// blocks of malloc than in these. So large blocks are mapped here, and the pages of freed ones are kept, as long as all
// of them together are within the budget, and not more than there ever was in use. A block that no stretch of kept pages
// can hold is made of several: `mremap` moves a page some fifty times faster than a new one is filled with zeros.

constexpr size_t LARGE = size_t(1) << 17;     // bytes
constexpr size_t FRAGMENT = size_t(1) << 16;  // bytes: new pages cost less than moving so few
constexpr size_t MAPPINGS = size_t(1) << 14;  // at most, of the 65,530 that Linux gives to a process by default

size_t pages(size_t bytes) { return (bytes + 4095) & ~size_t(4095); }

class Blocks {
 public:
  // A block of at least `size` bytes, which becomes what it really has; null: the system has none. `room`: bytes that it
  // and the kept ones may take together.
  void* take(size_t& size, int64_t room) {
    std::lock_guard lock(mutex_);
    size = pages(size);
    auto fitting = by_size_.lower_bound({size, nullptr});
    if (fitting != by_size_.end()) {
      const auto [length, block] = *fitting;
      drop(block, length);
      if (length - size < std::min(FRAGMENT, size / 8)) size = length;
      else keep(block + size, length - size);
      return block;
    }
    void* const mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    char* const block = static_cast<char*>(mapped);
    seams_.insert({block, block + size});
    for (size_t missing = size; missing >= FRAGMENT && !by_size_.empty() && seams_.size() < MAPPINGS;) {
      auto piece = by_size_.lower_bound({missing, nullptr});
      const auto [length, from] = piece == by_size_.end() ? *by_size_.rbegin() : *piece;
      if (length < FRAGMENT) break;
      const size_t used = std::min(length, missing);
      drop(from, length);
      if (!move_pages(from, block + size - missing, used)) {
        unmap(from, length), unmap(block, size);
        return nullptr;
      }
      if (length > used) keep(from + used, length - used);
      missing -= used;
    }
    shrink(room - int64_t(size));
    return block;
  }

  void give(void* block, size_t size, bool kept) {
    std::lock_guard lock(mutex_);
    if (kept) keep(static_cast<char*>(block), size);
    else unmap(static_cast<char*>(block), size);
  }

  bool keep_at_most(int64_t bytes) {  // whether more was kept
    std::lock_guard lock(mutex_);
    return shrink(bytes);
  }

  void before_fork() { mutex_.lock(); }  // kernels of other threads take memory without any other lock
  void after_fork() { mutex_.unlock(); }

 private:
  bool move_pages(char* from, char* to, size_t size) {  // one mapping at a time, as `mremap` needs it
    char* const end = from + size;
    const auto first = seams_.lower_bound(from);
    for (auto seam = seams_.upper_bound(from); from < end; ++seam) {
      const size_t part = seam == seams_.end() || *seam > end ? end - from : *seam - from;
      if (mremap(from, part, part, MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED) return false;
      from += part, to += part;
      seams_.insert(to);
      if (seam == seams_.end()) break;
    }
    seams_.erase(first, seams_.upper_bound(end));
    return true;
  }

  void unmap(char* block, size_t size) {
    munmap(block, size);
    seams_.erase(seams_.lower_bound(block), seams_.upper_bound(block + size));
  }

  void keep(char* block, size_t size) {  // as one with its neighbours
    auto after = by_address_.lower_bound(block);
    if (after != by_address_.end() && after->first == block + size) {
      const auto [next, length] = *after++;
      drop(next, length);
      size += length;
    }
    if (after != by_address_.begin()) {
      const auto [before, length] = *std::prev(after);
      if (before + length == block) {
        drop(before, length);
        block = before, size += length;
      }
    }
    by_address_.emplace(block, size);
    by_size_.emplace(size, block);
    bytes_ += size;
  }

  void drop(char* block, size_t size) {
    bytes_ -= size;
    by_address_.erase(block);
    by_size_.erase({size, block});
  }

  bool shrink(int64_t bytes) {  // the smallest first: large ones are worth more
    const int64_t most = std::max<int64_t>(0, bytes), before = bytes_;
    while (bytes_ > most) {
      const auto [length, block] = *by_size_.begin();
      const size_t much = std::min(length, pages(bytes_ - most));
      drop(block, length);
      unmap(block + length - much, much);
      if (length > much) keep(block, length - much);
    }
    return bytes_ < before;
  }

  std::mutex mutex_;
  std::map<char*, size_t> by_address_;             // what is kept
  std::set<std::pair<size_t, char*>> by_size_;     // the same
  std::set<char*> seams_;  // where one mapping may end and another one begin, in blocks in use and in kept ones
  int64_t bytes_ = 0;
};
Blocks& blocks = *new Blocks;

// Blocks below `LARGE` that have gone, for those of the same size that are asked for next. From malloc they take as long
// as all records of an operator; and where its heap ends with free memory, it gives that back to the system, whose pages
// are filled with zeros as they are used next, in every step again.
class KeptBlocks {
 public:
  static size_t rounded(size_t size) { return (size + STEP - 1) & ~(STEP - 1); }

  void* take(size_t size) {  // a rounded one; null: none is there
    if (size > MOST) return nullptr;
    const Alone here(busy_);
    Kept*& first = kept_[size / STEP];
    Kept* const block = first;
    if (!block) return nullptr;
    first = block->next;
    bytes_ -= int64_t(size);
    return block;
  }

  bool give(void* block, size_t size, int64_t most) {  // false: it is to be freed, or all would be more bytes
    if (size > MOST || bytes() + int64_t(size) > most) return false;
    const Alone here(busy_);
    Kept*& first = kept_[size / STEP];
    first = new (block) Kept{first};
    largest_ = std::max(largest_, size);
    bytes_ += int64_t(size);
    return true;
  }

  bool keep_at_most(int64_t most) {  // whether more was kept
    const bool more = bytes() > most;
    while (bytes() > most) {
      size_t size;
      {
        const Alone here(busy_);
        while (largest_ && !kept_[largest_ / STEP]) largest_ -= STEP;
        size = largest_;
      }
      if (void* block = take(size)) c10::free_cpu(block);
    }
    return more;
  }

  int64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

  void before_fork() {
    while (busy_.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
  }
  void after_fork() { busy_.clear(std::memory_order_release); }

 private:
  static constexpr size_t STEP = 64, MOST = LARGE + STEP;  // bytes
  struct Alone {  // for some nanoseconds
    std::atomic_flag& busy;
    explicit Alone(std::atomic_flag& busy) : busy(busy) {
      while (busy.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
    }
    ~Alone() { busy.clear(std::memory_order_release); }
  };
  struct Kept {
    Kept* next;
  };
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  std::atomic<int64_t> bytes_{0};
  size_t largest_ = 0;  // no larger one is kept
  Kept* kept_[MOST / STEP + 1] = {};  // by size
};
KeptBlocks& kept_blocks = *new KeptBlocks;
