// Several threads in one block: an operator that finds no room, since others hold their arguments, runs again alone.
//
// It writes nothing, and has given up its own arguments before: else threads could wait for each other. Only kernels of
// torch are waited for, which wait for no other thread.

std::atomic<int> threads{0};  // that have run an operator in this block
std::atomic<int> running_now{0}, waiting{0};
std::atomic<int> first{0};  // operators of the first thread, which takes no turns while it is the only one
alignas(std::mutex) char alone_bytes[sizeof(std::mutex)];
std::mutex& one_alone = *new (alone_bytes) std::mutex;

void forget_threads();  // in a child process, which has none of them

class Turn {
 public:
  explicit Turn(bool kernel) {
    static thread_local const Books* seen = nullptr;  // of the block in which this thread was counted
    if (C10_UNLIKELY(seen != count.open)) {
      seen = count.open;
      if (++threads > 1 && first) {
        const WithoutInterpreter here;
        while (first) rest();
      }
    }
    if (!kernel || mine) return;  // what a handler runs in the middle of an operator has the turn of that one
    mine = this;
    first++;
    if (C10_LIKELY(threads <= 1)) {
      counted_ = &first;
      return;
    }
    first--;
    counted_ = &running_now;
    while (running_now++, waiting) {
      running_now--;
      const WithoutInterpreter here;
      while (waiting) rest();
    }
  }
  ~Turn() {
    if (counted_) --*counted_;
    if (alone_.owns_lock()) waiting--;
    if (mine == this) mine = nullptr;
  }
  Turn(const Turn&) = delete;

  bool counts() const { return counted_ == &running_now; }
  bool is_alone() const { return alone_.owns_lock(); }
  void take_alone() {
    waiting++;
    running_now--;
    const WithoutInterpreter here;
    alone_ = std::unique_lock(one_alone);
    while (running_now) rest();
    running_now++;
  }

 private:
  friend void forget_threads();
  static void rest() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }
  static thread_local const Turn* mine;
  std::atomic<int>* counted_ = nullptr;  // among which operators this one is
  std::unique_lock<std::mutex> alone_;
};
thread_local const Turn* Turn::mine = nullptr;

void forget_threads() {
  const Turn* mine = Turn::mine;  // a handler may fork in the middle of an operator, which goes on in the child, too
  new (alone_bytes) std::mutex;
  if (mine && mine->is_alone()) one_alone.lock();
  threads = 1;
  first = mine && mine->counted_ == &first;
  running_now = mine && mine->counts();
  waiting = mine && mine->is_alone();
}
