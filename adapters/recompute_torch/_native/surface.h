// What Python calls, by ctypes: C functions of numbers. `storage` is the address of a StorageImpl.

namespace {

thread_local std::string failure;  // the text of the last error

// Run `work` under the lock. 0: done; else why not, since exceptions of C++ must not come out.
template <class F>
int caught(F&& work) {
  try {
    Lock lock;
    work();
    return 0;
  } catch (const NoRoom& error) {
    was_short = false;
    failure = error.what();
    return 2;
  } catch (const Interrupted&) {
    return 3;
  } catch (const std::exception& error) {
    failure = error.what();
    return 1;
  }
}

Value* value_at(int64_t storage) { return value_of(reinterpret_cast<StorageImpl*>(storage)); }

// Every live storage has its memory again, and is an ordinary one. One by one, so that the budget mostly does. Where many
// calls run again for that, since each evicts what the next one needs, the rest has the budget beside what is there then.
void give_everything_back(std::string& errors) {
  Raised here(lenient);
  forget_all_copies();
  for (auto* list : {&M.orphans, &M.kept}) {
    std::deque<Value*> last;
    last.swap(*list);
    for (Value* v : last) unref(v);
  }
  M.patience = M.repeats + 4 * M.calls + 1000;
  M.live = M.missing;
  for (Value* v : M.pool)
    if (v->alive()) M.live += v->bytes;
  for (const bool evicted : {false, true}) {
    Held held;
    for (Value* v = M.all.before; v != &M.all; v = v->before)
      if (v->alive() && v->call && v->resident() != evicted) held.add(v);
    for (Value* v : held.values) try {
        if (v->alive()) fix(v);
      } catch (const std::exception& error) {
        errors += error.what();
      }
  }
  Held held;
  for (Value* v = M.all.after; v != &M.all; v = v->after)
    if (v->alive()) held.add(v);
  for (Value* v : held.values) {
    const auto storage = storage_of(v);
    if (!storage || !v->resident()) continue;  // it is among the errors; who reads it gets one, too
    drop_call(v);
    unprotect(storage.get());
    auto& pointer = storage->_mutable_data_ptr_no_checks();
    pointer.release_context();
    pointer = v->data.give_back();
    show_in(v, nullptr);
    unref(v);
  }
  bury();
}

// Before, and in the child after, a process is forked off: nobody is in the middle of a change, and no budget holds.
// Not by hooks of Python: those that run after ours would do so under the lock, and may wait for threads that need it.
void before_fork() {
  Lock::take();
  blocks.before_fork();
  kept_blocks.before_fork();
}
void after_fork_in_parent() {
  blocks.after_fork();
  kept_blocks.after_fork();
  mutex.unlock();
}
void after_fork_in_child() {
  blocks.after_fork();
  kept_blocks.after_fork();
  new (mutex_bytes) Mutex;  // the thread that held it has another name here
  forget_threads();
  count.budget = INT64_MAX;
}

}  // namespace

extern "C" {

void rm_failure(char* text, int64_t size) { snprintf(text, size, "%s", failure.c_str()); }  // where one returned 1 or 2

_object* rm_raised() { return std::exchange(raised, nullptr); }  // where a function returned 3; ctypes takes it over

// powers: STEPS + 1 numbers; look, keep: functions of Python. Returns 0: open; 1: another block is.
int rm_open(int64_t budget, int64_t smallest, int64_t history, int form, int around, const double* powers, int64_t seed,
    int faults, void* error_type, void* look, void* keep) {
  Lock lock;
  if (count.open) return 1;
  if (!ordinary_allocator) {
    ordinary_allocator = c10::GetCPUAllocator();
    known_deleters().push_back(ordinary_allocator->raw_deleter());
    pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
  }
  policy.form = form, policy.around = around;
  std::copy(powers, powers + STEPS + 1, policy.power);
  random_state = 88172645463325252ull + 2 * uint64_t(seed);
  pressure = 0;
  budget_error = static_cast<_object*>(error_type), looker = static_cast<_object*>(look);
  keeper = static_cast<_object*>(keep);
  M.smallest = std::max<int64_t>(1, smallest), M.history = history;
  M.clock = 0, M.missing = 0, M.patience = INT64_MAX, M.next_look = OFTEN;
  for (auto& [schema, of] : rules)
    for (auto& rule : of) rule->repeats = rule->repeated_ticks = 0;
  M.operators = M.evictions = M.repeats = M.faults = M.scored = 0;
  M.repeated_ticks = 0;
  M.era = Era();
  M.tightest.clear();
  M.first_lap = true;
  guard = faults && addresses.open() ? Guard::FAULT : Guard::ERROR;
  if (guard == Guard::FAULT) watch_faults();
  count.books = new Books;
  count.beside = 0;
  count.budget = budget > 0 ? budget : INT64_MAX;
  threads = 0;
  count.open = count.books.load();
  c10::SetAllocator(at::kCPU, &counting, 1);
  return 0;
}

int rm_close() {
  Lock lock;
  std::string errors;
  if (!count.open) return 0;
  give_everything_back(errors);
  count.open = nullptr;
  c10::SetAllocator(at::kCPU, &afterwards, 1);
  blocks.keep_at_most(0);
  kept_blocks.keep_at_most(0);
  unwatch_faults();
  others.clear();
  failure = errors;
  return errors.empty() ? 0 : 1;
}

void rm_belongs_to_another(int64_t storage) {  // a block of the Python path
  Lock lock;
  others.insert(reinterpret_cast<StorageImpl*>(storage));
}
int64_t rm_asked() { return reinterpret_cast<int64_t>(asked); }

void rm_take_part(int on) {  // this thread
  c10::impl::tls_set_dispatch_key_included(KEY, on);
  joined = on ? count.open.load() : nullptr;
}
void rm_stepping(int on) { set_stepping(on); }

int rm_set_budget(int64_t budget) {
  return caught([&] {
    count.budget = budget > 0 ? budget : INT64_MAX;
    evict_until_there_is_room(0);
    kept_blocks.keep_at_most(may_keep());
    blocks.keep_at_most(count.room());
  });
}

int64_t rm_release(int64_t wanted) {  // evict so many bytes, if there are so many; how many went
  Lock lock;
  return evict_at_least(wanted);
}

void keep(int64_t tensor) {  // what is on its storage is a source from now on
  auto* t = reinterpret_cast<TensorImpl*>(tensor);
  if (is_undefined(t) || !ordinary(t)) return;
  if (Value* v = value_of(t->unsafe_storage().unsafeGetStorageImpl())) fix(v);
}
int rm_keep(int64_t tensor) {
  return caught([&] { keep(tensor); });
}
int rm_keep_all(const int64_t* tensors, int64_t many) {
  return caught([&] { std::for_each(tensors, tensors + many, &keep); });
}

int rm_commit() {
  return caught([] { TORCH_CHECK(commit(), "there is no room for all that is alive; raise the budget before"); });
}

int rm_state(int64_t storage) {  // 0: unknown, 1: source, 2: made, 3: evicted; and 4: its address is known outside
  Lock lock;
  Value* v = value_at(storage);
  return !v ? 0 : (!v->resident() ? 3 : v->call ? 2 : 1) + 4 * v->escaped;
}

void rm_figures(int64_t* into) {  // bytes and numbers; the last two are nanoseconds
  Lock lock;
  int64_t sources = 0;
  for (Value* v = M.all.after; v != &M.all; v = v->after)
    if (!v->call && v->resident()) sources += v->bytes;
  const Books& books = *count.books;
  const double unit = 1e9 * M.era.seconds_a_tick();
  const int64_t all[] = {books.used, books.peak, books.lap, books.overshoot, M.operators, M.evictions, M.repeats,
      M.values, M.calls, M.faults, M.scored, int64_t(M.pool.size()), M.pool_bytes, M.missing, sources,
      int64_t(double(M.clock) * unit), int64_t(double(M.repeated_ticks) * unit)};
  std::copy(std::begin(all), std::end(all), into);
}

// A line for each operator that ran again: its name, how often, and the seconds that this took.
void rm_repeated(char* text, int64_t size) {
  Lock lock;
  std::string lines;
  for (auto& [schema, of] : rules)
    for (auto& rule : of)
      if (rule->repeats) {
        char figures[64];
        snprintf(figures, sizeof figures, "\t%lld\t%.9f\n", (long long)rule->repeats,
            double(rule->repeated_ticks) * M.era.seconds_a_tick());
        lines += in_python_words(rule->name) + figures;
      }
  snprintf(text, size, "%s", lines.c_str());
}

int64_t rm_needed() { return needed_at_once; }  // by the last operator that found no room, with what was in use

// What the tightest operator of this lap had in memory that could not be evicted; of that, its own; its name. Gradients,
// which could be evicted in the first lap, count as well where they were there; how many bytes of them, is the third.
void rm_tightest(const int64_t* gradients, int64_t many, int64_t* into, char* name, int64_t size) {
  Lock lock;
  *name = into[0] = into[1] = into[2] = 0;
  for (const Tightest& one : M.tightest) {
    int64_t beside = 0;
    for (int64_t i = 0; i < many; i++)
      if (Value* v = value_at(gradients[i]); v && can_go(v) && v->born < one.when) beside += v->bytes;
    if (one.bytes + beside <= into[0] + into[2]) continue;
    into[0] = one.bytes, into[1] = one.own, into[2] = beside;
    snprintf(name, size, "%s", in_python_words(one.rule->name).c_str());
  }
}

void rm_next_lap() {
  Lock lock;
  count.books.load()->lap = count.used();
  M.tightest.clear();
  M.first_lap = false;
}

double rm_height(double cost, double neighbours, double bytes, double staleness, int pressure_) {
  return policy.height(cost, neighbours, bytes, staleness, pressure_);
}

int64_t rm_problems() {  // inconsistencies in the records: 0, or a number that says which
  Lock lock;
  int64_t values = 0, pool_bytes = 0, missing = 0;
  for (Value* v = M.all.after; v != &M.all; v = v->after) {
    values++;
    if (v->pins) return 1;
    if (v->impl && value_of(v->impl) != v) return 2;
    if (v->resident() && !v->impl && v->call) return 3;
    if (!v->resident() && !v->call && (v->impl || !v->users.empty())) return 4;  // else its last user has gone
    if ((v->place >= 0) != evictable(v)) return 5;
    if (v->place >= 0) pool_bytes += v->bytes;
    if (v->alive() && v->call && !v->resident()) missing += v->bytes;
    if (v->needed != v->is_needed()) return 11;
    uint32_t needed_by = 0;
    for (const Use& use : v->users)
      for (const Value* out : use.call->outputs) needed_by += out && out->needed;
    if (v->needed_by != needed_by) return 12;
    if (v->call && (v->number >= v->call->outputs.size() || v->call->outputs[v->number] != v)) return 6;
    for (uint32_t i = 0; i < v->users.size(); i++) {
      const Use& use = v->users[i];
      if (use.call->given[use.given].value != v || use.call->given[use.given].use != i) return 7;
    }
  }
  if (values != M.values) return 8;
  if (pool_bytes != M.pool_bytes) return 9;
  if (missing != M.missing) return 10;
  return 0;
}

}  // extern "C"
