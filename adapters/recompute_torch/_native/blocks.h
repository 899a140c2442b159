// Where counted memory comes from, so that what the system gives follows the count.
//
// malloc keeps freed blocks of up to 32 MB in its heap: a process whose tensors take half then has nearly as much as
// before. And pages that are asked for anew each time cost up to a third of a step. So within a budget large blocks are
// mapped here, and the pages of freed ones are kept, as long as all of them together are within the budget. What no kept
// block fits is made of the pages of several: `mremap` moves a page some fifty times faster than a new one is filled
// with zeros.

constexpr size_t LARGE = size_t(1) << 17;   // bytes
constexpr size_t MAPPINGS = size_t(1) << 14;  // at most, of the 65,530 that Linux gives to a process by default

size_t pages(size_t bytes) { return (bytes + 4095) & ~size_t(4095); }

class Blocks {
 public:
  // A block of at least `size` bytes, which becomes what it really has; null: the system has none. `room`: bytes that it
  // and the kept ones may take together.
  void* take(size_t& size, int64_t room) {
    std::lock_guard lock(mutex_);
    size = pages(size);
    auto piece = free_.lower_bound(size);
    if (piece != free_.end() && (piece->first <= size + size / 8 || piece->first - size >= LARGE)) {
      char* block = piece->second;
      const size_t length = piece->first;
      drop(piece);
      if (length - size < LARGE) size = length;
      else keep(block + size, length - size);
      return block;
    }
    void* block = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) return nullptr;
    size_t moved = 0;
    while (size - moved >= LARGE && !free_.empty() && free_.size() + seams_.size() < MAPPINGS)
      if (!move_pages(static_cast<char*>(block), size, moved)) {
        end(static_cast<char*>(block), size, false);
        return nullptr;
      }
    shrink(room - int64_t(size));
    return block;
  }

  void give(void* block, size_t size, bool kept) {
    std::lock_guard lock(mutex_);
    end(static_cast<char*>(block), size, kept);
  }

  void keep_at_most(int64_t bytes) {
    std::lock_guard lock(mutex_);
    shrink(bytes);
  }

 private:
  using Pieces = std::multimap<size_t, char*>;  // by size; each lies within one mapping, as `mremap` needs it

  // Moves pages of a kept piece, the smallest that has enough or else the largest, to where `block` has none yet.
  bool move_pages(char* block, size_t size, size_t& moved) {
    const size_t missing = size - moved;
    auto piece = free_.lower_bound(missing);
    if (piece == free_.end()) --piece;
    char* const from = piece->second;
    const size_t length = piece->first, used = std::min(length, missing);
    if (mremap(from, used, used, MREMAP_MAYMOVE | MREMAP_FIXED, block + moved) == MAP_FAILED) return false;
    drop(piece);
    if (length - used >= LARGE) keep(from + used, length - used);
    else if (length > used) munmap(from + used, length - used);
    if (moved) seams_.insert(block + moved);
    moved += used;
    if (moved < size) seams_.insert(block + moved);
    return true;
  }

  void end(char* block, size_t size, bool kept) {
    char* from = block;
    for (auto seam = seams_.upper_bound(block); seam != seams_.end() && *seam < block + size; seam = seams_.erase(seam)) {
      if (kept) keep(from, *seam - from);
      from = *seam;
    }
    if (kept) keep(from, block + size - from);
    else munmap(block, size);
  }

  void keep(char* piece, size_t size) {
    free_.emplace(size, piece);
    bytes_ += size;
  }

  void drop(Pieces::iterator piece) {
    bytes_ -= piece->first;
    free_.erase(piece);
  }

  void shrink(int64_t bytes) {  // the smallest first: large ones are worth more
    while (bytes_ > std::max<int64_t>(0, bytes)) {
      auto first = free_.begin();
      munmap(first->second, first->first);
      drop(first);
    }
  }

  std::mutex mutex_;
  Pieces free_;
  std::set<char*> seams_;  // where another mapping begins within a block that is in use
  int64_t bytes_ = 0;
};
Blocks& blocks = *new Blocks;
