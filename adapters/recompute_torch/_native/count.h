// Bytes: while a block is open the CPU allocations of threads that take part are counted, and room is made before.
//
// In front of each allocation lie 64 bytes (so that it stays aligned) which say its size and the block that counts it:
// what was allocated before the block, or in an earlier one, is not subtracted when it goes. Such memory is counted
// from the moment at which an operator takes it.

// Of one budget block. It is never freed: what it counts may go at any time after it, in the middle of the next one.
struct Books {
  std::atomic<int64_t> used{0}, peak{0}, lap{0}, overshoot{0};
};

struct Header {
  int64_t bytes;
  int64_t mapped;  // bytes of a block that is not from malloc; 0: it is
  uint64_t ours;   // tells it from what another allocator gave: see `release_raw`
  Books* books;    // of the budget block that counts it; null: none does
  static uint64_t mark(const Header* head) { return 0x9e3779b97f4a7c15ull ^ reinterpret_cast<uintptr_t>(head); }
};
constexpr size_t AHEAD = 64;
static_assert(sizeof(Header) <= AHEAD);

struct Count {
  std::atomic<Books*> books{new Books};  // of the block that is open, or was last
  std::atomic<Books*> open{nullptr};     // the same, which tell one block from another; null: no block is open
  std::atomic<int64_t> most{0};  // since an operator began, with what its kernel takes for a while, as if
  std::atomic<int64_t> evicted{0};  // what has been evicted since were there, too
  std::atomic<int64_t> budget{INT64_MAX};
  std::atomic<int64_t> beside{0};  // bytes that need no room, as a block ends

  int64_t used() const { return books.load(std::memory_order_relaxed)->used.load(std::memory_order_relaxed); }
  bool reserve(Books& into, int64_t bytes) {  // false: there is no room
    int64_t now = into.used.load(std::memory_order_relaxed);
    do {
      if (C10_UNLIKELY(!fits(bytes, now)) && is_open(&into)) return false;
    } while (!into.used.compare_exchange_weak(now, now + bytes, std::memory_order_relaxed));
    note(into, now + bytes);
    return true;
  }
  void add(Books& into, int64_t bytes) { note(into, into.used.fetch_add(bytes, std::memory_order_relaxed) + bytes); }
  void note(Books& into, int64_t now) {
    raise(into.peak, now);
    raise(into.lap, now);
    raise(most, now + evicted.load(std::memory_order_relaxed));
    if (C10_UNLIKELY(now > budget.load(std::memory_order_relaxed))) raise(into.overshoot, now - budget.load());
  }
  bool is_open(const Books* of) const { return of && of == open.load(std::memory_order_relaxed); }
  static void raise(std::atomic<int64_t>& most, int64_t now) {
    int64_t known = most.load(std::memory_order_relaxed);
    while (now > known && !most.compare_exchange_weak(known, now, std::memory_order_relaxed)) {
    }
  }
  bool limited() const { return budget.load(std::memory_order_relaxed) != INT64_MAX; }
  int64_t room() const {  // without a limit: until there is more than there ever was
    const Books& now = *books.load(std::memory_order_relaxed);
    return std::min(budget.load(std::memory_order_relaxed), now.peak.load(std::memory_order_relaxed)) - now.used.load();
  }
  bool fits(int64_t more) const { return fits(more, used()); }
  bool fits(int64_t more, int64_t now) const {
    return now - beside.load(std::memory_order_relaxed) + more <= budget.load(std::memory_order_relaxed);
  }
};
Count& count = *new Count;

thread_local int bookkeeping = 0;  // what is allocated now belongs to a recipe, and is not counted, as recipes are not
struct Raised {  // a counter of this thread is one higher while this exists
  int& depth;
  explicit Raised(int& of) : depth(of) { depth++; }
  ~Raised() { depth--; }
};

bool make_room(int64_t wanted);  // whether there is room now
bool evict_some(int64_t wanted);     // whether there was anything
[[noreturn]] void throw_no_room(int64_t wanted);
bool may_throw();  // whether an error can come out of here
bool takes_part();  // whether what this thread allocates is the block's

c10::Allocator* ordinary_allocator = nullptr;  // what there was before

constexpr int64_t MANY_KEPT = int64_t(1) << 19;  // bytes of kept blocks in any budget

int64_t may_keep() { return std::max(MANY_KEPT, count.room()); }

struct Counting : c10::Allocator {
  static Header* header(void* data) { return reinterpret_cast<Header*>(static_cast<char*>(data) - AHEAD); }
  static void release(void* data) {
    if (!data) return;
    Header* head = header(data);
    Books* const books = head->books;
    const int64_t bytes = head->bytes;
    head->ours = 0;
    if (head->mapped) blocks.give(head, head->mapped, count.is_open(books));
    else if (!count.open || !kept_blocks.give(head, KeptBlocks::rounded(bytes + AHEAD), may_keep())) c10::free_cpu(head);
    if (books) books->used -= bytes;  // not before: another thread may take the room
  }
  // What `raw_allocate` gave goes to the allocator of that moment, as do oneDNN's tensors, which may live from a block to
  // after it, or from before it. What others gave is aligned, too: if it does not begin a page, its page has a place for
  // a header; and ours never does.
  static void release_raw(void* data) {
    if (!data) return;
    const bool can_be_ours = !begins_page(data) && header(data)->ours == Header::mark(header(data));
    if (can_be_ours) release(data);
    else ordinary_allocator->raw_deleter()(data);  // which tells profilers
  }
  static bool begins_page(const void* data) { return reinterpret_cast<uintptr_t>(data) % 4096 == 0; }
  static void reserve(Books& into, int64_t bytes) {  // others may take the room that was made
    while (C10_UNLIKELY(!count.reserve(into, bytes))) {
      if (make_room(bytes)) continue;
      if (may_throw()) throw_no_room(bytes);
      return count.add(into, bytes);
    }
  }
  static bool give_back_kept() {  // false: nothing is kept
    const bool large = blocks.keep_at_most(0), small = kept_blocks.keep_at_most(0);
    return large || small;
  }
  static void* from_malloc(size_t bytes, bool counted) {  // the machine's memory may be shorter than the budget
    while (true) {
      try {
        void* block = c10::alloc_cpu(bytes);
        if (C10_LIKELY(!begins_page(static_cast<char*>(block) + AHEAD))) return block;
        void* other = from_malloc(bytes, counted);
        c10::free_cpu(block);
        return other;
      } catch (const c10::Error&) {
        if (!give_back_kept() && !(counted && evict_some(bytes))) throw;
      }
    }
  }
  at::DataPtr allocate(size_t bytes) override {
    const at::Device cpu(at::kCPU);
    if (!bytes) return {nullptr, nullptr, &release, cpu};
    Books* const books = bookkeeping || !takes_part() ? nullptr : count.open.load(std::memory_order_acquire);
    if (books) reserve(*books, bytes);
    size_t mapped = 0;
    void* block = nullptr;
    if (books && bytes >= LARGE) {
      mapped = bytes + AHEAD;
      block = blocks.take(mapped, count.room() + int64_t(bytes) - kept_blocks.bytes());
    }
    const size_t size = KeptBlocks::rounded(bytes + AHEAD);
    if (!block) block = kept_blocks.take(size);
    if (C10_UNLIKELY(kept_blocks.bytes() > MANY_KEPT)) kept_blocks.keep_at_most(may_keep());
    if (!block) {
      mapped = 0;
      try {
        block = from_malloc(size, books);
      } catch (...) {
        if (books) books->used -= int64_t(bytes);
        throw;
      }
    }
    new (block) Header{int64_t(bytes), int64_t(mapped), Header::mark(static_cast<Header*>(block)), books};
    void* data = static_cast<char*>(block) + AHEAD;
    return {data, data, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_raw; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Counting& counting = *new Counting;
struct Afterwards final : Counting {  // what blocks have counted may still go; nothing is counted any more
  at::DataPtr allocate(size_t bytes) override { return ordinary_allocator->allocate(bytes); }
};
Afterwards& afterwards = *new Afterwards;

class Bytes {  // the memory of a value, and what of it the allocator has not counted
 public:
  Bytes() = default;
  explicit Bytes(at::DataPtr&& from, size_t bytes = 0) : data_(std::move(from)) {
    from.clear();  // a DataPtr that is moved from still says where the memory is
    if (bytes && !is_counted(data_) && (books_ = count.open)) count.add(*books_, extra_ = int64_t(bytes));
  }
  static bool is_counted(const at::DataPtr& data) {
    return data.get_deleter() == &Counting::release && count.is_open(Counting::header(data.get())->books);
  }
  Bytes(Bytes&& other) { *this = std::move(other); }
  Bytes& operator=(Bytes&& other) {
    clear();
    data_ = std::move(other.data_);
    other.data_.clear();
    extra_ = std::exchange(other.extra_, 0);
    books_ = other.books_;
    return *this;
  }
  ~Bytes() { clear(); }
  void clear() {
    discount();
    at::DataPtr last = std::move(data_);  // its deleter may ask for what this holds
    data_.clear();
  }
  at::DataPtr give_back() {
    discount();
    at::DataPtr data = std::move(data_);
    data_.clear();
    return data;
  }
  void* get() const { return data_.get(); }
  at::Device device() const { return data_.device(); }

 private:
  void discount() {
    if (extra_) books_->used -= extra_;
    extra_ = 0;
  }
  at::DataPtr data_;
  int64_t extra_ = 0;
  Books* books_ = nullptr;
};
