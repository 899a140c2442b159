// The fallback: every operator call of a thread that takes part, below autograd and below modes in Python.
//
// Before: the arguments are known, pinned and in memory, and what a write would spoil is seen to. The call runs without
// the lock. After: what it made are values, with the call as their recipe.

const DispatchKeySet BELOW(DispatchKeySet::FULL_AFTER, KEY);

// A number, or a few integers, is not worth a recipe; and code of torch above its operators reads these by their address,
// between operators: batch sizes of a packed sequence, say. The same limits as in _recipe.py, in bytes.
bool is_tiny(const TensorImpl* t, size_t bytes) {
  if (bytes <= 16) return true;
  const auto type = c10::typeMetaToScalarType(t->dtype());
  const bool lengths = type == c10::ScalarType::Long && t->dim() == 1;
  return bytes <= (lengths ? 1 << 14 : 1 << 10) && c10::isIntegralType(type, true);
}

c10::DeleterFnPtr blob_deleter() {  // of memory that comes from NumPy, among others
  static const auto deleter = c10::InefficientStdFunctionContext::makeDataPtr(
      nullptr, [](void*) {}, at::Device(at::kCPU)).get_deleter();
  return deleter;
}

std::vector<c10::DeleterFnPtr>& known_deleters() {
  static auto& known = *new std::vector<c10::DeleterFnPtr>{&Counting::release, &unmap};
  return known;
}

// A storage that is met for the first time: a source, so far. None: its memory is of a special kind, which is known by
// its deleter (shared with another process, of NumPy), so that must not be hidden, or NumPy has it, too.
// What an operator of others has made on an array of its own (`made`) is a value like any other.
Value* adopt(StorageImpl* storage, bool made = false) {
  refuse_what_others_have(storage);
  if (c10::impl::cow::is_cow_data_ptr(storage->_mutable_data_ptr_no_checks())) storage->mutable_data_ptr();
  auto& pointer = storage->_mutable_data_ptr_no_checks();
  const auto& known = known_deleters();
  const auto deleter = pointer.get_deleter();
  const bool array = made && deleter == blob_deleter();
  if (!pointer.get() || !(array || storage->resizable()) ||
      !(array || std::find(known.begin(), known.end(), deleter) != known.end()))
    return nullptr;
  if (!Bytes::is_counted(pointer)) evict_until_there_is_room(storage->nbytes());  // it is there, and counted from now on
  Value* v = new_value(storage->nbytes());
  v->data = Bytes(std::move(pointer), v->bytes);
  wrap(v, storage);
  v->refs = 1;
  v->unshared = array;
  arm(storage);
  return v;
}

std::unique_ptr<Call> new_call(const OperatorHandle& op, const Rule& rule, DispatchKeySet keys, const Form& form,
    c10::ArrayRef<Met> met, bool hides) {
  std::unique_ptr<Call> call;
  if (M.unused.empty()) {
    call = std::make_unique<Call>(op, rule);
  } else {
    call.reset(M.unused.back());
    M.unused.pop_back();
    call->op = op, call->rule = &rule;
    call->live = 0, call->cost = 0, call->seen = 0;
  }
  call->keys = keys;
  call->default_dtype = c10::get_default_dtype();
  call->grad = c10::GradMode::is_enabled();
  form.remember(call->arguments, met);
  for (const Met& m : met) {
    if (hides && (m.position == rule.hidden || m.position == rule.hidden + 1)) continue;  // it does not read them
    Given& g = call->given.emplace_back();
    g.value = m.value;
    g.position = m.position;
    g.item = m.item;
    g.number = m.tensor->is_wrapped_number();
    g.dtype = m.tensor->dtype();
    g.keys = m.tensor->key_set();
    g.offset = m.tensor->storage_offset();
    const auto sizes = m.tensor->sizes(), strides = m.tensor->strides();
    g.shape.append(sizes.begin(), sizes.end());
    g.shape.append(strides.begin(), strides.end());
  }
  if (rule.seeded) {
    Running quietly(nullptr);
    Raised own(bookkeeping);
    call->state = generator_of(call->arguments).get_state();
  }
  return call;
}

// A call has run: its outputs are values that it makes. Targets hold other values from now on.
void attach(Call* call, c10::ArrayRef<StorageImpl*> targets, c10::ArrayRef<Value*> made) {
  M.calls++;
  for (uint32_t i = 0; i < call->given.size(); i++) {
    Given& g = call->given[i];
    if (!g.value) continue;
    g.use = g.value->users.size();
    g.value->users.push_back({call, i});
    g.value->refs++;
  }
  const auto enter = [&](Value* v) {
    v->call = call;
    v->number = call->outputs.size();
    call->outputs.push_back(v);
    call->live++;
  };
  for (StorageImpl* storage : targets) {
    Value* old = value_of(storage);
    Value* v = new_value(old->bytes);
    leave_pool(old);
    v->data = std::move(old->data);
    storage->_mutable_data_ptr_no_checks().release_context();
    wrap(v, storage);
    v->refs = 1;
    show_in(old, nullptr);
    old->blank = false;
    v->unshared = old->unshared;
    enter(v);
    if (old->call) old->chain = chain_of(old);
    update_needed(old);
    unref(old);
  }
  for (Value* v : made) {
    if (v) enter(v);
    else call->outputs.push_back(nullptr);
  }
  for (Value* v : call->outputs)
    if (v) v->used = M.clock, enter_pool(v);
}

bool covers(const TensorImpl* t, const StorageImpl* storage) {  // it is all there is of its storage, each byte once
  return size_t(t->numel()) * t->itemsize() == storage->nbytes() && t->is_non_overlapping_and_dense();
}

// What a tensor lies on that is no ordinary one, and may share it with ordinary ones: the parts of a sparse tensor; the
// memory of one that is nested, or of a class with operators of its own.
template <class F>
void each_part(TensorImpl* t, F&& f) {
  const auto part = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage()) f(tensor.storage().unsafeGetStorageImpl());
  };
  if (t->has_storage()) return f(t->unsafe_storage().unsafeGetStorageImpl());
  if (t->key_set().has(DispatchKey::Python)) return;
  if (t->key_set().has(DispatchKey::SparseCPU)) {
    auto* sparse = static_cast<at::SparseTensorImpl*>(t);
    part(sparse->indices()), part(sparse->values());
  } else if (t->key_set().has(DispatchKey::SparseCsrCPU)) {  // or of a kind like it
    auto* sparse = static_cast<at::SparseCsrTensorImpl*>(t);
    part(sparse->compressed_indices()), part(sparse->plain_indices()), part(sparse->values());
  }
}

class Operator;
thread_local const Operator* remembered = nullptr;  // the recorded call whose code, of others, is running

class Operator {
 public:
  Operator(const OperatorHandle& op, const Rule& rule, DispatchKeySet keys, Form& form)
      : op(op), rule(rule), keys(keys), form(form) {}

  ~Operator() {
    if (remembered == this) remembered = nullptr;
  }

  bool before() {  // false: the block has ended meanwhile, and the operator is none of our business
    Lock lock;
    if (C10_UNLIKELY(!block || count.open != block || has_left())) return false;
    M.operators += !within;
    meet();
    if (C10_UNLIKELY(rule.kind == Kind::RESIZE || !rule.own)) hold_storages();
    if (C10_UNLIKELY(evicted)) bring_all();
    bool record = !within && !quiet() && !strange && !rule.out && !rule.once && (rule.kind == Kind::MAKE || rule.kind == Kind::WRITE);
    if (C10_UNLIKELY(outside) && record) record = copy_what_is_outside();
    find_targets(record);
    const bool hides = rule.hidden >= 0 && form.is_training();
    for (const Met& m : met) {
      if (!m.value) continue;
      const bool hidden = hides && (m.position == rule.hidden || m.position == rule.hidden + 1);
      if (rule.kind == Kind::RESIZE || hidden) own(m.storage);
    }
    if (!record)
      for (StorageImpl* storage : targets)
        if (!remembered || !remembered->writes(storage)) own(storage);
    for (Met& m : met)  // `own` may have given it another value
      if (m.value && !m.outside && value_of(m.storage) != m.value) {
        m.value = value_of(m.storage);
        if (m.value) pinned.add(m.value);
      }
    if (!record) return true;
    call = new_call(op, rule, keys, form, met, hides);
    call->written = written;
    return true;
  }

  void run() {
    Running below(&op, rule.own);
    if (call && !rule.own) remembered = this;
    was_short = false;
    if (!within) {
      count.evicted.store(0, std::memory_order_relaxed);
      count.most.store(count.used(), std::memory_order_relaxed);
    }
    const uint64_t began = ticks();
    form.run(op, keys);
    took = ticks() - began;
  }

  void failed() {  // what it wrote to may hold anything
    Lock lock;
    if (count.open != block) return;  // the block has ended meanwhile
    Raised here(lenient);
    for (StorageImpl* storage : targets) {
      Value* v = value_of(storage);
      if (!v || v->escaped) continue;
      if (was_short && v->call && v->resident()) evict(v);  // the fault was ours, and the recipe is still there
      else own(storage);
    }
    was_short = false;
    rearm();
  }

  void after() {
    Lock lock;
    if (count.open != block) return;  // it has ended meanwhile
    if (within) return rearm();  // its time is that of the call around it, and what it makes is, too
    M.clock += took;
    c10::SmallVector<Value*, 4> made;
    const bool odd = meet_outputs(made);
    const int64_t most = count.most.load(std::memory_order_relaxed) - count.evicted - M.pool_bytes;
    const bool tight = (M.first_lap && count.limited()) || M.tightest.empty() || most > M.tightest[0].bytes;
    if (C10_UNLIKELY(tight) && !quiet()) note_tightest(most, made);
    for (StorageImpl* storage : targets) {
      Value* v = value_of(storage);
      if (!v) adopt(storage);  // it has got other memory
      if (!v || !v->call) call.reset();  // or code of others has made it a source
    }
    if (call) {
      call->cost = took;
      const bool needed = !targets.empty() || std::any_of(made.begin(), made.end(), [](Value* v) { return v; });
      if (needed) attach(call.release(), targets, made);
      else discard(call.release());
    }
    if (odd) {  // a sparse tensor, say, has storages of its arguments
      Raised here(lenient);
      for (const Met& m : met)
        if (Value* v = value_of(m.storage)) fix(v);
    }
    if (!rule.own) see_what_was_kept();
    rearm();
    if (C10_UNLIKELY(!M.orphans.empty()) && !quiet()) tidy();
    if (C10_UNLIKELY(M.calls > M.history) && !commit()) M.history = M.calls + M.calls / 8;
    pinned.release();  // here, since the lock is taken
  }

  bool writes(const StorageImpl* storage) const {
    return std::find(targets.begin(), targets.end(), storage) != targets.end();
  }

 private:
  void note_tightest(int64_t bytes, c10::ArrayRef<Value*> made) {
    auto& known = M.tightest;
    while (!known.empty() && known.back().bytes <= bytes) known.pop_back();
    if (known.size() >= 4096) return;  // what comes now takes little
    Tightest now{bytes, std::max<int64_t>(0, bytes + M.pool_bytes - count.used()), &rule, M.operators};  // freed since
    const uint64_t walk = ++M.walks;
    const auto add = [&](Value* v) {
      if (v && std::exchange(v->seen, walk) != walk) now.own += v->bytes;
    };
    for (const Met& m : met)
      if (m.value && m.value->call) add(m.value);
    for (Value* v : made) add(v);
    known.push_back(now);
  }

  void meet() {
    form.each_argument([&](TensorImpl* t, int at, int item) {
      if (is_undefined(t)) return;
      if (C10_UNLIKELY(!ordinary(t))) {
        strange = true;
        return each_part(t, [&](StorageImpl* storage) {
          if (value_of(storage)) meet(t, at, item, storage, value_of(storage));
        });
      }
      StorageImpl* storage = t->unsafe_storage().unsafeGetStorageImpl();
      Value* v = value_of(storage);
      if (!v && storage->nbytes() && !within) {
        if (t->is_wrapped_number()) return;  // it is kept as it is
        v = adopt(storage);
      }
      meet(t, at, item, storage, v);
    });
  }

  void meet(TensorImpl* t, int at, int item, StorageImpl* storage, Value* v) {
    bool others = false;
    if (v) {
      v->used = M.clock;
      pinned.add(v);
      evicted |= !v->resident();
      others = v->escaped || C10_UNLIKELY(!storage->resizable() && !v->unshared);
    } else {
      others = storage->nbytes();
    }
    outside |= others;
    met.push_back({t, int16_t(at), int16_t(item), v, storage, 0, others});
  }

  void hold_storages() {  // a tensor may get another one, and be the last that has this one
    for (Met& m : met) held.push_back(c10::intrusive_ptr<StorageImpl>::reclaim_copy(m.storage));
    for (Met& m : met) m.references = references(m.storage);
  }

  void bring_all() {
    c10::SmallVector<Value*, 6> values;
    for (const Met& m : met)
      if (m.value) values.push_back(m.value);
    bring(values, pinned);
  }

  bool copy_what_is_outside() {  // false: it cannot be copied
    for (Met& m : met) {
      if (!m.outside) continue;
      m.value = copy_of(m.storage);
      if (!m.value) return false;
      pinned.add(m.value);
    }
    return true;
  }

  // Which storages are written; `record` becomes false if one is a source. A buffer that is still empty is like a made
  // value if all of it is overwritten; whatever else reads it makes it a source.
  void find_targets(bool& record) {
    for (uint16_t position : rule.writes)
      for (uint32_t i = 0; i < met.size(); i++) {
        const Met& m = met[i];
        if (m.position != position || !m.value) continue;
        record = record && m.value->call && !m.value->escaped;
        if (!writes(m.storage)) targets.push_back(m.storage), written.push_back(i);
      }
    for (const Met& m : met) {
      if (!m.value || C10_LIKELY(!m.value->blank)) continue;
      size_t times = 0;
      for (const Met& other : met) times += other.value == m.value;
      const bool overwritten = rule.overwrites && times == 1 && !strange && targets.size() == 1 && targets[0] == m.storage &&
          covers(m.tensor, m.storage);
      if (overwritten) continue;
      fix(m.value);
      record = record && !writes(m.storage);
    }
    record = record && (rule.writes.empty() || !targets.empty());
  }

  // The new values, in the order of outputs; null for a number. True: there is a tensor that is no ordinary one.
  bool meet_outputs(c10::SmallVector<Value*, 4>& made) {
    bool odd = false;
    form.each_output([&](TensorImpl* t, int, int) {
      if (is_undefined(t)) return;
      if (!ordinary(t)) return void(odd = odd || !t->is_meta());
      StorageImpl* storage = t->unsafe_storage().unsafeGetStorageImpl();
      if (!storage->nbytes() || value_of(storage)) return;
      Value* v = adopt(storage, !rule.own);
      if (v && rule.buffer) v->blank = call != nullptr;
      made.push_back(v && !is_tiny(t, v->bytes) ? v : nullptr);
    });
    return odd;
  }

  static uint32_t references(StorageImpl* storage) { return c10::raw::intrusive_ptr::use_count(storage); }

  // Code of others may have kept an address, or an array on it. (Torch's own operators do not.)
  void see_what_was_kept() {
    for (const Met& m : met) {
      Value* v = m.value ? value_of(m.storage) : nullptr;
      if (!v || v->escaped) continue;
      if (references(m.storage) > m.references) {
        Raised here(lenient);
        escaped(m.storage);
      } else if (!m.storage->resizable()) {
        v->unshared = true;  // the array has gone with the call
      }
    }
  }

  void rearm() {  // a kernel's access to its arguments has used up the notice
    for (const Met& m : met) {
      if (!m.value) continue;
      Value* v = value_of(m.storage);
      if (!v || !v->resident()) continue;
      if (C10_UNLIKELY(!m.storage->resizable()) && !v->unshared && !within && rule.own) {
        Raised here(lenient);  // another thread has got an array on it
        escaped(m.storage);
      } else if (!v->escaped) {
        arm(m.storage);
      }
    }
  }

  const OperatorHandle& op;
  const Rule& rule;
  const DispatchKeySet keys;
  Form& form;
  const Books* const block = count.open;
  const bool within = nested > 0;  // code of others, whose call is the one that is remembered
  bool strange = false, outside = false, evicted = false;
  c10::SmallVector<Met, 6> met;
  c10::SmallVector<StorageImpl*, 2> targets;
  c10::SmallVector<uint32_t, 1> written;
  c10::SmallVector<c10::intrusive_ptr<StorageImpl>, 1> held;
  Pinned pinned;
  std::unique_ptr<Call> call;
  uint64_t took = 0;
};

bool ran(const OperatorHandle& op, const Rule& rule, DispatchKeySet keys, Form& form, const Turn& turn) {
  Operator here(op, rule, keys, form);
  const bool again = turn.counts() && !turn.is_alone() && rule.writes.empty() && !rule.seeded;
  std::optional<Lock> drawing;  // one thread at a time draws: a repeat sets a generator back for a while
  if (rule.seeded) drawing.emplace();
  try {
    if (!here.before()) {
      drawing.reset();
      form.run(op, keys);
      return true;
    }
    try {
      here.run();
    } catch (...) {
      here.failed();
      throw;
    }
  } catch (const NoRoom&) {
    if (!again) throw;
    was_short = false;
    return false;
  }
  here.after();
  return true;
}

void track(const OperatorHandle& op, const Rule& rule, DispatchKeySet keys, Form& form) {
  Turn turn(rule.own && !rule.once && !nested);
  if (C10_UNLIKELY(turn.counts())) form.keep();
  while (!ran(op, rule, keys, form, turn)) {
    turn.take_alone();
    form.restore();
  }
  look_at_repeats();
}

bool is_tracked() { return C10_LIKELY(count.open && !has_left()); }

void on_operator(const OperatorHandle& op, DispatchKeySet all, Stack* stack) {
  const DispatchKeySet keys = all & BELOW;
  if (!is_tracked()) return op.redispatchBoxed(keys, stack);
  const Rule& rule = rule_of(op);
  if (C10_UNLIKELY(rule.span)) see_span(rule.span);
  if (rule.kind == Kind::PASS) return op.redispatchBoxed(keys, stack);
  Boxed form(rule, stack);
  track(op, rule, keys, form);
}

template <class Op, class Schema = typename Op::schema>
struct Kernel;

template <class Op, class Result, class... Arguments>
struct Kernel<Op, Result(Arguments...)> {
  static Result call(DispatchKeySet all, Arguments... arguments) {
    const DispatchKeySet keys = all & BELOW;
    if (!is_tracked()) return Op::redispatch(keys, static_cast<Arguments>(arguments)...);
    static const OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    static const Rule& rule = rule_of(op);
    Typed<Op, Result(Arguments...)> form(static_cast<Arguments>(arguments)...);
    track(op, rule, keys, form);
    return form.result();
  }
};

template <class... Ops>
void track_as_written(torch::Library& library) {
  (library.impl(std::string(Ops::name).append(*Ops::overload_name ? "." : "").append(Ops::overload_name).c_str(),
       TORCH_FN(Kernel<Ops>::call)), ...);
}
