// Values and calls: what refers to what, and how they go.

using at::DataPtr;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using c10::StorageImpl;
using c10::TensorImpl;
using torch::jit::Stack;

struct Call;
struct Rule;
struct Use {  // who reads a value, and as which of its arguments
  Call* call;
  uint32_t given;
};

struct Value {
  StorageImpl* impl = nullptr;            // the program's storage, or `own`, or none any more
  c10::intrusive_ptr<StorageImpl> own;    // made for a repeat, when the program's storage is gone
  void* range = nullptr;                  // addresses that stand for the memory while it is evicted: see guard.h
  Bytes data;                             // the memory; empty: evicted, overwritten or gone
  size_t bytes = 0;
  Call* call = nullptr;                   // none: a source
  uint32_t number = 0;                    // which output of the call
  uint32_t refs = 0;                      // the storage, each argument of a call, and what holds it for now
  int32_t pins = 0;
  int32_t place = -1;                     // in the pool of what may be evicted
  bool escaped = false;                   // its address is known outside of operators, where it may be written to
  bool unshared = false;                  // the storage cannot be resized, as if NumPy had it, but nobody else has it
  bool blank = false;                     // an empty buffer: whatever is there, no repeat would make the same
  bool gone = false;                      // another thread is destroying the program's storage, which is known already
  bool needed = false;                    // evicted, and alive or on the way to such a value: see `set_needed`
  uint32_t needed_by = 0;                 // how often it is an input of needed values
  uint64_t used = 0;                      // on the compute clock
  int64_t born = 0;                       // how many operators with the one that made it
  double chain = 0;                       // ticks to make it with its evicted ancestors, as it lost its memory
  double around = 0;                      // what its neighbourhood cost when it was last counted
  uint64_t known = 0;                     // until how many evictions and repeats that counts
  uint64_t seen = 0;                      // by which walk
  Value *before = nullptr, *after = nullptr;  // all values
  c10::SmallVector<Use, 2> users;
  bool resident() const { return data.get() != nullptr; }
  bool alive() const { return impl && !own; }  // the program can ask for it
  bool is_needed() const { return call && !resident() && (alive() || needed_by); }
};

struct Given {  // a tensor among the arguments: geometry on a value
  Value* value = nullptr;   // none: it has no bytes
  uint32_t use = 0;         // where in value->users
  int16_t position = 0;     // of the argument
  int16_t item = -1;        // in a list
  bool number = false;      // a number that was wrapped: types promote differently
  caffe2::TypeMeta dtype;
  DispatchKeySet keys;
  int64_t offset = 0;
  c10::SmallVector<int64_t, 4> shape;  // sizes, then strides
};

struct Call {
  OperatorHandle op;
  const Rule* rule;
  DispatchKeySet keys;
  caffe2::TypeMeta default_dtype;
  bool grad = false;                        // some kernels make more when it is
  uint32_t live = 0;                        // outputs that can still be asked for
  uint64_t cost = 0, seen = 0;              // ticks; by which walk
  std::vector<IValue> arguments;            // None where a tensor belongs
  std::vector<Given> given;
  c10::SmallVector<Value*, 2> outputs;      // first what it wrote, then what is new; null: nobody can ask for it
  c10::SmallVector<uint32_t, 1> written;    // for each written output: which of `given` it was
  at::Tensor state;                         // of the generator before it drew
  Call(const OperatorHandle& op, const Rule& rule) : op(op), rule(&rule) {}
};

struct Tightest {  // an operator with much in memory that could not be evicted, outside of optimizers' steps
  int64_t bytes = 0, own = 0;  // all of it; of that what the operator took that can be evicted, made, and had meanwhile
  const Rule* rule = nullptr;
  int64_t when = 0;  // how many operators with it
};

struct Machine {
  size_t smallest = 1;               // bytes: less is never evicted
  int64_t history = 100000;          // calls that are remembered at most
  uint64_t clock = 0;                // ticks of all calls so far
  std::vector<Value*> pool;          // what may be evicted
  int64_t pool_bytes = 0, missing = 0;  // of the pool; of what is evicted and alive
  Value all;                         // head of the list
  std::vector<Value*> dying;
  bool burying = false;
  std::vector<Call*> unused;            // for the next operators, with the memory of their vectors
  std::deque<Value*> orphans, kept;  // sources that only calls need; those of them that were found to be worth it
  Era era;
  std::vector<Tightest> tightest;  // of this lap, the most; in the first lap then the most of all after it, and so on
  bool first_lap = true;           // gradients can be evicted in it
  int64_t operators = 0, evictions = 0, values = 0, calls = 0, faults = 0, scored = 0;
  std::atomic<int64_t> repeats{0};    // read without the lock, as are
  std::atomic<int64_t> next_look{0};  // repeats at which Python is asked whether it is too much
  int64_t patience = INT64_MAX, live = 0;  // repeats, as the block ends, after which so many bytes need no room
  uint64_t repeated_ticks = 0, walks = 0, changes = 0;
  Machine() { all.before = all.after = &all; }
};
Machine& M = *new Machine;

void storage_gone(void* value);
void own_gone(void* value);  // one that was made for a repeat

Value* value_of(StorageImpl* storage) {
  auto& data = storage->_mutable_data_ptr_no_checks();
  const auto deleter = data.get_deleter();
  return deleter == &storage_gone || deleter == &own_gone ? static_cast<Value*>(data.get_context()) : nullptr;
}

// The pool of what may be evicted

bool can_go(const Value* v) { return v->call && !v->escaped && !v->blank && v->bytes >= M.smallest; }

bool evictable(const Value* v) { return can_go(v) && v->resident() && !v->pins; }

void leave_pool(Value* v) {
  if (v->place < 0) return;
  M.pool.back()->place = v->place;
  M.pool[v->place] = M.pool.back();
  M.pool.pop_back();
  M.pool_bytes -= v->bytes;
  v->place = -1;
}

void enter_pool(Value* v) {
  if (v->place >= 0 || !evictable(v)) return;
  v->place = M.pool.size();
  M.pool.push_back(v);
  M.pool_bytes += v->bytes;
}

// Their end, with a list instead of recursion: histories are long

void bury();

void unref(Value* v) {
  if (--v->refs == 0) {
    M.dying.push_back(v);
    bury();
  }
}

double chain_of(const Value* v) {  // what it costs with its evicted ancestors; where these meet again, they count twice
  double sum = v->call->cost;
  for (const Given& g : v->call->given)
    if (g.value && !g.value->resident()) sum += g.value->chain;
  return std::min(sum, 1e300);
}

// Tell the values it is made from, and theirs, with a list instead of recursion. A walk visits evicted values alone,
// all of which have to run again before the next such walk.
void set_needed(Value* v, bool needed) {
  static auto& changed = *new std::vector<Value*>;
  if (C10_LIKELY(v->needed == needed)) return;
  v->needed = needed;
  for (changed.push_back(v); !changed.empty();) {
    const Call* call = changed.back()->call;
    changed.pop_back();
    for (const Given& g : call->given) {
      Value* input = g.value;
      if (!input) continue;
      input->needed_by += needed ? 1 : -1;
      if (input->needed == needed || input->is_needed() != needed) continue;
      input->needed = needed;
      changed.push_back(input);
    }
  }
}

void update_needed(Value* v) { set_needed(v, v->is_needed()); }  // its memory or its storage is another one

void forget_missing(Value* v) {
  if (v->alive() && v->call && !v->resident()) M.missing -= v->bytes;
}

void discard(Call* call) {
  constexpr size_t MANY = 1 << 12;
  if (M.unused.size() >= MANY) return delete call;
  call->arguments.clear(), call->given.clear(), call->outputs.clear(), call->written.clear();
  call->state.reset();
  M.unused.push_back(call);
}

void drop_call(Value* v) {  // it becomes a source, or dies
  Call* call = v->call;
  if (!call) return;
  leave_pool(v);
  forget_missing(v);
  set_needed(v, false);
  v->call = nullptr;
  call->outputs[v->number] = nullptr;
  if (--call->live) return;
  M.calls--;
  std::vector<c10::intrusive_ptr<StorageImpl>> unneeded;  // made for repeats of what nobody can ask for any more
  for (Given& g : call->given) {
    Value* input = g.value;
    if (!input) continue;
    auto& users = input->users;
    users[g.use] = users.back();
    users[g.use].call->given[users[g.use].given].use = g.use;
    users.pop_back();
    if (users.empty() && !input->impl && !input->pins) input->data.clear();  // a source that was kept for this
    if (users.empty() && input->own) unneeded.push_back(std::move(input->own));
    if (--input->refs == 0) M.dying.push_back(input);
  }
  discard(call);
}

void unreserve(Value* v, bool keep = false);

void bury() {
  if (M.burying) return;
  M.burying = true;
  while (!M.dying.empty()) {
    Value* v = M.dying.back();
    M.dying.pop_back();
    leave_pool(v);
    unreserve(v);
    v->data.clear();
    drop_call(v);
    v->before->after = v->after;
    v->after->before = v->before;
    M.values--;
    delete v;
  }
  M.burying = false;
}

Value* new_value(size_t bytes) {
  auto* v = new Value;
  v->bytes = bytes;
  v->used = M.clock;
  v->born = M.operators;
  v->after = M.all.after;
  v->before = &M.all;
  M.all.after->before = v;
  M.all.after = v;
  M.values++;
  return v;
}

// With a weak reference: the last strong one then goes in one step, so that `storage_of` gets one before that, or none.
void show_in(Value* v, StorageImpl* storage) {
  StorageImpl* const before = std::exchange(v->impl, storage);
  if (storage) c10::raw::weak_intrusive_ptr::incref(storage);
  if (before) c10::raw::weak_intrusive_ptr::decref(before);
}

void wrap(Value* v, StorageImpl* storage) {  // the storage shows the value's memory; it must hold no other value
  const auto gone = v->own.get() == storage ? &own_gone : &storage_gone;
  storage->_mutable_data_ptr_no_checks() = DataPtr(v->data.get(), v, gone, v->data.device());
  show_in(v, storage);
}

bool wanted(const Value* v);
void give_storage(Value* v);

void forget_storage(Value* v, bool needed = false) {
  forget_missing(v);
  show_in(v, nullptr);
  unreserve(v);
  const bool can_stay = v->call && v->resident() && !v->escaped && !v->blank;
  if (can_stay && (needed || wanted(v))) {  // what needs it was cheap to evict because of this
    give_storage(v);
    enter_pool(v);
  } else if (v->call || (v->users.empty() && !v->pins)) {
    leave_pool(v);
    v->data.clear();
    if (v->call) v->chain = chain_of(v);
  } else if (!v->users.empty()) {  // a source that calls need: whether it is worth its memory is seen to later
    v->refs++;
    M.orphans.push_back(v);
  }
  update_needed(v);
}

void storage_gone(void* context) {
  Lock lock;
  auto* v = static_cast<Value*>(context);
  if (!std::exchange(v->gone, false)) forget_storage(v);
  unref(v);
}

void own_gone(void* context) {
  Lock lock;
  auto* v = static_cast<Value*>(context);
  forget_storage(v);
  unref(v);
}

// The storage of a value, so that no other thread can destroy it meanwhile. None: there is none any more. One whose
// destructor waits for our lock in another thread must not be touched.
c10::intrusive_ptr<StorageImpl> storage_of(Value* v) {
  if (!v->impl) return {};
  if (auto* storage = static_cast<StorageImpl*>(c10::raw::weak_intrusive_ptr::lock(v->impl)))
    return c10::intrusive_ptr<StorageImpl>::reclaim(storage);
  v->gone = true;
  forget_storage(v, v->pins > 0);
  return {};
}

class Held {  // values that live while this exists
 public:
  void add(Value* v) {
    v->refs++;
    values.push_back(v);
  }
  ~Held() {
    Lock lock;
    for (Value* v : values) unref(v);
  }
  c10::SmallVector<Value*, 8> values;
};

class Pinned {  // values that stay in memory while this exists
 public:
  Pinned() = default;
  Pinned(const Pinned&) = delete;
  void add(Value* v) {
    if (v->pins++ == 0) leave_pool(v);
    v->refs++;
    values.push_back(v);
  }
  ~Pinned() {
    if (values.empty()) return;
    Lock lock;
    release();
  }
  void release() {
    c10::SmallVector<Value*, 8> last;
    last.swap(values);
    for (Value* v : last) {
      if (--v->pins == 0) enter_pool(v);
      if (!v->pins && !v->impl && !v->call && v->users.empty()) v->data.clear();
      unref(v);
    }
  }
  c10::SmallVector<Value*, 8> values;
};
